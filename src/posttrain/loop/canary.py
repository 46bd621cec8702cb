"""Judges a canary by the outcomes that its arms report: promotes it, rolls it back, or lets it run on.

Outcomes are entries of feedback that name the arm (`posttrain.data.feedback.entries.Feedback`). They are read from the
inbox itself, in the order of their arrival, so that a judgement needs no round and depends on nobody's timing: the same
outcome decides, whichever process looks, and whenever.
"""

import logging
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from datetime import datetime, timedelta
from typing import Any

import numpy as np

from posttrain.data.feedback.entries import outcome_of, read_entry
from posttrain.data.feedback.segment import list_segments
from posttrain.evaluate.sequential import BLOCK_OUTCOMES, SequentialResult, run_test
from posttrain.loop.config import Config
from posttrain.loop.hooks import CanaryConfig
from posttrain.loop.model_registry import ModelRegistry
from posttrain.store.database import utc_now
from posttrain.store.errors import UserError, shorten
from posttrain.store.hashing import read_lines
from posttrain.store.logs import EVENT
from posttrain.store.rows import Canary
from posttrain.store.workspace import Workspace

log = logging.getLogger("posttrain")

_FIRST_SEGMENT = "first_segment"

_EXPECTED = 7.0
"""Outcomes of an arm that are expected by now: with a probability of e^-7, below 0.1%, none has come by chance."""

_GROWTH = 1.1
"""Growth of the outcomes from which a canary's numbers are written and logged again: a watching loop looks often."""


@dataclass(frozen=True)
class ArmOutcomes:
    """Outcomes of one arm: ``good`` of ``total``."""

    name: str
    model: str
    share: float
    good: int
    total: int

    @property
    def text(self) -> str:
        """The arm in words, such as ``canary-3 180 of 260 good (69.2%)``."""
        share = f" ({self.good / self.total:.1%})" if self.total else ""
        return f"{self.name} {self.good:,} of {self.total:,} good{share}"


@dataclass(frozen=True)
class Outcomes:
    """Outcomes since the start of a canary.

    Attributes:
        treatment: bool [N], True for outcomes of the canary, in the order of their arrival.
        good: bool [N].
        unknown: Number of entries by an arm's name that no canary of this workspace has.
        unnamed: Number of outcomes that name no arm.
        unclear: Number of entries of the two arms that do not say whether the answer was good.
    """

    treatment: np.ndarray
    good: np.ndarray
    unknown: Mapping[str, int]
    unnamed: int
    unclear: int


@dataclass(frozen=True)
class Judgement:
    """The numbers of a canary, and what they decide.

    Attributes:
        status: ``running``, or the status that the canary must end with; see `posttrain.store.rows.Canary`.
        canary: Outcomes of the canary that count.
        champion: Outcomes of the champion that count.
        difference: Share of the canary minus that of the champion; None until both have outcomes.
        test: The sequential test.
        problems: A line for each thing that keeps outcomes from counting.
        line: All of it in one line.
    """

    status: str
    canary: ArmOutcomes
    champion: ArmOutcomes
    difference: float | None
    test: SequentialResult
    problems: tuple[str, ...]
    line: str
    unclear: int = 0
    unnamed: int = 0
    unknown: Mapping[str, int] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """Returns the judgement as JSON has it."""
        return asdict(self) | {"problems": list(self.problems), "unknown": dict(self.unknown)}


def start_canary(workspace: Workspace, config: Config, model_id: str, share: float, reason: str) -> Canary:
    """Starts a canary; see `ModelRegistry.start_canary` for the errors."""
    # Earlier segments cannot name its arms, and an inbox may hold the feedback of years.
    segments = list_segments(workspace.home / "inbox")
    detail = {_FIRST_SEGMENT: int(segments[-1].stem) if segments else 1}
    return ModelRegistry(workspace, config.deploy).start_canary(model_id, share, reason=reason, detail=detail)


def judge_canary(workspace: Workspace, config: Config) -> str | None:
    """Judges the canary that runs, and promotes it, rolls it back or ends it undecided, if its outcomes say so.

    Logs the decision, what keeps outcomes from counting, and the numbers if they have grown.

    Returns:
        The canary in one line, or None if none runs.

    Raises:
        DamagedArtifactError: the canary's model is missing or damaged, and was to be promoted.
    """
    registry = ModelRegistry(workspace, config.deploy)
    canary = registry.running_canary
    if canary is None:
        return None
    judgement = judge(workspace, canary, config.deploy.canary)
    before = canary.detail.get("judgement")
    for problem in judgement.problems:
        if before is None or problem not in before["problems"]:
            log.warning("%s: %s", canary.name, problem)
    detail = {**canary.detail, "judgement": judgement.as_dict()}
    if judgement.status != "running":
        ended = registry.end_canary(canary.id, judgement.status, judgement.line, detail)
        log.info("%s", describe_canary(ended), extra=EVENT)
        return describe_canary(ended)
    total = judgement.canary.total + judgement.champion.total
    seen = sum(before[arm]["total"] for arm in ("canary", "champion")) if before else -1
    if list(judgement.problems) != (before or judgement.as_dict())["problems"] or total > seen * _GROWTH:
        workspace.metadata.update_canary(canary.id, detail=detail)
        log.info("%s", judgement.line)
    return judgement.line


def judge(workspace: Workspace, canary: Canary, config: CanaryConfig, now: datetime | None = None) -> Judgement:
    """Computes what a canary's outcomes say; changes nothing.

    Args:
        config: The test's settings.
        now: Time of the judgement; None for now.
    """
    end = canary.created_at + timedelta(days=config.days)
    outcomes = read_outcomes(workspace, canary, until=end)
    treatment, good = outcomes.treatment[: config.max_outcomes], outcomes.good[: config.max_outcomes]
    test = run_test(
        treatment,
        good,
        share=canary.share,
        alpha=config.alpha,
        margin=config.margin,
        minimum=config.min_outcomes,
    )
    # What came after the decision takes no part in it.
    treatment, good = treatment[: test.outcomes], good[: test.outcomes]
    arms = [
        ArmOutcomes(name, model, share, int((good & arm).sum()), int(arm.sum()))
        for name, model, share, arm in (
            (canary.name, canary.model_id, canary.share, treatment),
            (canary.champion_name, canary.champion_id, 1 - canary.share, ~treatment),
        )
    ]
    now = now or utc_now()
    status = {"worse": "rolled_back", "not_worse": "promoted"}.get(test.decision or "", "running")
    if status == "running" and (len(good) >= config.max_outcomes or now >= end):
        status = "kept"
    shares = [arm.good / arm.total for arm in arms if arm.total]
    difference = shares[0] - shares[1] if len(shares) == 2 else None
    return Judgement(
        status=status,
        canary=arms[0],
        champion=arms[1],
        difference=difference,
        test=test,
        problems=tuple(_problems(workspace, canary, arms, outcomes, test, now)),
        line=_line(arms, difference, test, config, status),
        unclear=outcomes.unclear,
        unnamed=outcomes.unnamed,
        unknown=outcomes.unknown,
    )


def read_outcomes(workspace: Workspace, canary: Canary, until: datetime) -> Outcomes:
    """Reads the outcomes that the inbox holds, those of the open segment too.

    Args:
        until: Time after which nothing counts.
    """
    rows: list[tuple[bool, bool]] = []
    unknown: Counter[str] = Counter()
    # Users may answer days later: outcomes of earlier canaries are nobody's mistake.
    names = {name for row in workspace.metadata.canaries() for name in (row.name, row.champion_name)}
    unnamed = unclear = 0
    for path in list_segments(workspace.home / "inbox"):
        if int(path.stem) < canary.detail.get(_FIRST_SEGMENT, 1):
            continue
        try:
            raw = path.read_bytes()
        except FileNotFoundError:
            # The server has sealed it since the folder was listed.
            raw = path.with_suffix(".jsonl").read_bytes()
        for entry in read_lines(raw).values:
            try:
                feedback = read_entry(entry)
                received = datetime.fromisoformat(entry["received"])
            except (UserError, ValueError):
                continue  # reading the inbox into datasets reports such a line
            if received > until:
                continue
            outcome = outcome_of(feedback.model_dump())
            if feedback.arm is None:
                unnamed += outcome is not None and received >= canary.created_at
            elif feedback.arm not in names:
                unknown[feedback.arm] += received >= canary.created_at
            elif feedback.arm in (canary.name, canary.champion_name):
                if outcome is None:
                    unclear += 1
                else:
                    rows.append((feedback.arm == canary.name, outcome))
    values = np.array(rows, bool).reshape(-1, 2)
    return Outcomes(
        values[:, 0], values[:, 1], {name: count for name, count in unknown.most_common(5) if count}, unnamed, unclear
    )


def describe_canary(canary: Canary) -> str:
    """Describes a canary in one line, with the numbers of its last judgement."""
    share, since = f"{100 * canary.share:g}%", canary.created_at.strftime("%Y-%m-%d %H:%M UTC")
    judgement = canary.detail.get("judgement")
    if canary.status != "running":
        return f"{canary.name} {canary.status.replace('_', ' ')}: {canary.conclusion}"
    numbers = judgement["line"] if judgement else "not judged yet"
    return f"{canary.name}: {canary.model_id} has {share} of the requests since {since}; {numbers}"


def canary_problems(canary: Canary) -> list[str]:
    """Returns what the last judgement of a canary complained about."""
    judgement = canary.detail.get("judgement")
    return list(judgement["problems"]) if judgement and canary.status == "running" else []


def _problems(
    workspace: Workspace,
    canary: Canary,
    arms: list[ArmOutcomes],
    outcomes: Outcomes,
    test: SequentialResult,
    now: datetime,
) -> list[str]:
    # Without numbers that grow with each outcome: a loop that watches would say each line again and again.
    both = f"{canary.name} or {canary.champion_name}"
    problems = [
        f"feedback names the arm `{shorten(name)}`, and only {both} counts: send the `name` of the arm that answered"
        for name in outcomes.unknown
    ]
    total = sum(arm.total for arm in arms)
    waited = now - canary.created_at > timedelta(days=1)
    for arm in arms:
        if not arm.total and (total * arm.share / (1 - arm.share) >= _EXPECTED or waited):
            problems.append(
                f"{arm.name} has reported no outcome: check that the server reads the split, and sends "
                f'"arm": "{arm.name}" with the feedback'
            )
    # Only outcomes of the same time are compared: those of an arm that has gone silent wait.
    for arm, other, waiting in zip(arms, reversed(arms), reversed(test.waiting), strict=True):
        expected = waiting * other.share / arm.share
        if other.total and min(waiting, expected) >= BLOCK_OUTCOMES + _EXPECTED and not test.decision:
            problems.append(
                f"{other.name} does not report at the time of {arm.name}: outcomes are compared within the same time, "
                "and many have none to be compared with"
            )
    return problems


def _line(
    arms: list[ArmOutcomes], difference: float | None, test: SequentialResult, config: CanaryConfig, status: str
) -> str:
    """Describes the judgement in one line; the texts in it are translated piece by piece."""
    counts = f"{arms[0].text}, {arms[1].text}"
    if difference is None:
        return counts
    level = 1 - 2 * config.alpha
    interval = f"{100 * test.low:+.1f} to {100 * test.high:+.1f}"
    numbers = f"{counts}: {100 * difference:+.1f} points ({level:.0%} interval {interval})"
    margin = f"{100 * config.margin:g} points"
    if status == "rolled_back":
        return f"{numbers}; surely worse (evidence {test.worse:.3g} of {test.needed:.3g})"
    if status == "promoted":
        return f"{numbers}; surely not worse by {margin} (evidence {test.not_worse:.3g} of {test.needed:.3g})"
    if status == "kept":
        return f"{numbers}; undecided in time, the champion stays"
    return (
        f"{numbers}; undecided (evidence of {test.needed:.3g}: worse {test.worse:.3g}, "
        f"not worse by {margin} {test.not_worse:.3g})"
    )
