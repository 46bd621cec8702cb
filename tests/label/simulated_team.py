"""Simulated annotators with planted faults, and the answers that a team of them gives."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from posttrain.label.answers import ANSWERS

_MISLED = 0.4
"""Probability that a misleading item misleads: such errors are shared, as real ones are."""


@dataclass(frozen=True)
class SimulatedItem:
    """An item as it is shown.

    Attributes:
        id: Its id.
        truth: The right label.
        labels: The labels.
        suggestion: The suggested label; None for none.
        planted: True if the suggestion is a planted wrong one.
        misleading: A wrong label that the item's text suggests; None for none.
    """

    id: int
    truth: str
    labels: Sequence[str]
    suggestion: str | None = None
    planted: bool = False
    misleading: str | None = None


class Reply(NamedTuple):
    """An answer and the seconds that it took."""

    answer: str
    seconds: float


@dataclass
class SimulatedAnnotator:
    """Answers items with a given accuracy, speed and faults; call ``answer`` in the order of the items.

    Attributes:
        name: Name.
        accuracy: Probability of the right label; a mapping gives it by class.
        confusion: Wrong labels by right label; None spreads errors evenly over all others.
        seconds: Median time of an answer.
        spread: Standard deviation of the logarithm of the times.
        drift_after: Number of answers after which the accuracy becomes ``drift_accuracy``; None for no drift.
        drift_accuracy: Accuracy after the drift.
        suggestion_bias: Probability of accepting a suggestion unread.
        guesses: Probability of an answer at random, unread.
        constant: Label that is given, with the probability ``constant_share``, whatever the item.
        constant_share: See ``constant``.
    """

    name: str
    accuracy: float | Mapping[str, float] = 0.9
    confusion: Mapping[str, Sequence[str]] | None = None
    seconds: float = 8.0
    spread: float = 0.5
    drift_after: int | None = None
    drift_accuracy: float = 0.5
    suggestion_bias: float = 0.0
    guesses: float = 0.0
    constant: str | None = None
    constant_share: float = 0.5
    given: int = 0

    def answer(self, item: SimulatedItem, rng: np.random.Generator) -> Reply:
        """Answers an item; ``rng`` decides everything that is random."""
        reply = self._choose(item, rng)
        self.given += 1
        return Reply(reply, float(self.seconds * np.exp(self.spread * rng.standard_normal())))

    def _choose(self, item: SimulatedItem, rng: np.random.Generator) -> str:
        habits = (
            (item.suggestion, self.suggestion_bias),
            (self.constant, self.constant_share),
            (item.labels[int(rng.integers(len(item.labels)))], self.guesses),
        )
        for label, probability in habits:
            # Every habit draws, so that adding one to an annotator changes no draw of the others.
            if rng.random() < probability and label is not None and label in item.labels:
                return label
        if item.misleading is not None and rng.random() < _MISLED:
            return item.misleading
        if rng.random() < self._accuracy(item.truth):
            return item.truth
        others = [label for label in item.labels if label != item.truth]
        usual = self.confusion.get(item.truth, others) if self.confusion else others
        wrong = [label for label in usual if label in others] or [item.truth]
        return wrong[int(rng.integers(len(wrong)))]

    def _accuracy(self, truth: str) -> float:
        if self.drift_after is not None and self.given >= self.drift_after:
            return self.drift_accuracy
        return self.accuracy.get(truth, 0.9) if isinstance(self.accuracy, Mapping) else self.accuracy


@dataclass(frozen=True)
class TeamSettings:
    """How items are handed out.

    Attributes:
        overlap: Annotators an item; one more answers where they differ, and a reviewer where no answer has a majority.
        gold_rate: Gold items as a share of the items; each is answered by everybody.
        check_rate: Share of the other items that one more annotator answers.
        suggestion_rate: Share of the answers that are given with a suggestion.
        suggestion_accuracy: Share of right ones among the suggestions that are not planted.
        planted_rate: Share of the suggestions that are planted wrong ones.
        misleading_rate: Share of the items that mislead everybody to the same wrong label.
    """

    overlap: int = 3
    gold_rate: float = 0.1
    check_rate: float = 0.05
    suggestion_rate: float = 0.0
    suggestion_accuracy: float = 0.8
    planted_rate: float = 0.1
    misleading_rate: float = 0.0


def simulate_answers(
    team: Sequence[SimulatedAnnotator],
    truth: Sequence[str],
    settings: TeamSettings,
    *,
    seed: int = 0,
    labels: Sequence[str] | None = None,
    started_at: datetime = datetime(2026, 1, 5, 9, tzinfo=UTC),
) -> pa.Table:
    """Has a team answer items, and resolves them by majority, or by a reviewer who knows the right label.

    Args:
        team: The annotators; the number of their answers grows.
        truth: The right label of each item.
        settings: How items are handed out.
        seed: Seed of everything that is random.
        labels: The label set; by default that of ``truth``, sorted.
        started_at: Time of the first answer. All annotators work at the same time.

    Returns:
        Table of the schema `posttrain.label.answers.ANSWERS`, by time.
    """
    rng = np.random.default_rng(seed)
    names = tuple(labels) if labels is not None else tuple(sorted(set(truth)))
    clock = {annotator.name: 0.0 for annotator in team}
    rows: list[dict[str, object]] = []
    for item, right in enumerate(truth):
        gold = bool(rng.random() < settings.gold_rate)
        checked = not gold and bool(rng.random() < settings.check_rate)
        wanted = len(team) if gold else min(len(team), settings.overlap + checked)
        chosen = list(rng.choice(len(team), wanted, replace=False))
        wrong = [name for name in names if name != right]
        misleads = bool(wrong) and rng.random() < settings.misleading_rate
        misleading = wrong[int(rng.integers(len(wrong)))] if misleads else None
        given: list[str] = []
        for member in chosen:
            annotator = team[member]
            shown = replace(_shown_item(item, right, names, settings, rng), misleading=misleading)
            answer, seconds = annotator.answer(shown, rng)
            clock[annotator.name] += seconds
            given.append(answer)
            rows.append(
                {
                    **{"item": item, "record": f"r{item}", "batch": "simulated", "annotator": annotator.name},
                    **{"answer": answer, "expected": right if gold else None, "checked": checked},
                    "deciding": not gold and len(given) > wanted,
                    **{"suggestion": shown.suggestion, "planted": shown.planted, "seconds": seconds},
                    **{"confidence": None, "guideline": 1},
                    "created_at": started_at + timedelta(seconds=clock[annotator.name]),
                }
            )
            # As the queue does: one more where they differ.
            if len(given) == wanted and not gold and len(set(given)) > 1:
                chosen += list(rng.permutation([at for at in range(len(team)) if at not in chosen]))[:1]
        winner, tied = _winner(given), _winner(given) is None
        for row in rows[-len(given) :]:
            row["resolution"] = right if gold or tied else winner
            row["resolved_by"] = "review" if tied else "majority" if len(given) > 1 else "single"
    rows.sort(key=lambda row: (row["created_at"], row["item"]))
    return pa.Table.from_pylist(rows, schema=ANSWERS)


def _winner(answers: Sequence[str]) -> str | None:
    """Returns the answer of more than half; None if there is none."""
    (answer, votes), *_ = Counter(answers).most_common(1)
    return answer if 2 * votes > len(answers) else None


def _shown_item(
    item: int, right: str, labels: tuple[str, ...], settings: TeamSettings, rng: np.random.Generator
) -> SimulatedItem:
    if rng.random() >= settings.suggestion_rate:
        return SimulatedItem(item, right, labels)
    planted = bool(rng.random() < settings.planted_rate)
    wrong = [label for label in labels if label != right]
    correct = not planted and rng.random() < settings.suggestion_accuracy
    suggestion = right if correct or not wrong else wrong[int(rng.integers(len(wrong)))]
    return SimulatedItem(item, right, labels, suggestion, planted and suggestion != right)
