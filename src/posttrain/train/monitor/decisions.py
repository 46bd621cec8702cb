"""Findings of the detectors, and the policy that turns a finding into an action."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, Self, get_args

from posttrain.store.errors import WorkError
from posttrain.train.monitor.config import MonitorConfig

Kind = Literal["nan", "explosion", "divergence", "plateau", "dead_layers", "no_supervised"]

Action = Literal["warn", "skip", "rollback", "lower_rate", "stop"]

KINDS: tuple[Kind, ...] = get_args(Kind)

ACTIONS: tuple[Action, ...] = get_args(Action)
"""From the mildest to the gravest."""

FAULT_KINDS: tuple[Kind, ...] = ("nan", "explosion", "divergence")
"""After these the weights are in doubt, or about to be."""


@dataclass(frozen=True)
class Finding:
    """Something is wrong with a step, or with the steps up to it.

    Attributes:
        what: one line for a person.
        value: what was measured; None where it is no finite number or there is nothing to measure.
        limit: what it was held against; None likewise.
        since: the first step in doubt; where nothing else is given, ``step``. To roll back, go back before it.
    """

    kind: Kind
    step: int
    what: str
    value: float | None = None
    limit: float | None = None
    since: int = -1

    def __post_init__(self) -> None:
        for name in ("value", "limit"):
            object.__setattr__(self, name, finite(getattr(self, name)))
        if self.since < 0:
            object.__setattr__(self, "since", self.step)


@dataclass(frozen=True)
class Decision:
    """What the trainer is to do about a finding.

    - ``warn``: go on.
    - ``skip``: leave this step's gradient out and go on with the next batch.
    - ``rollback``: go back to the last good checkpoint, and past the data of this step.
    - ``lower_rate``: multiply the learning rate from now on; after a fault, go back as well (see `restores`).
    - ``stop``: end the training.

    Attributes:
        why: why it is not the configured action; empty if it is.
        can_go_back: whether there is a checkpoint.
    """

    finding: Finding
    action: Action
    why: str = ""
    can_go_back: bool = True

    @property
    def restores(self) -> bool:
        """Whether to go back to the last good checkpoint."""
        return self.can_go_back and self.drops_gradient and self.action in ("rollback", "lower_rate")

    @property
    def drops_gradient(self) -> bool:
        """Whether the optimiser must not step with the gradient at hand."""
        lowers_after_fault = self.action == "lower_rate" and self.finding.kind in FAULT_KINDS
        return lowers_after_fault or self.action in ("skip", "rollback", "stop")

    @property
    def gravity(self) -> int:
        """Position among the actions, mildest first."""
        return ACTIONS.index(self.action)

    def line(self) -> str:
        """One line for a log."""
        action = self.action.replace("_", " ")
        return f"step {self.finding.step}: {self.finding.what}: {action}" + (f" ({self.why})" if self.why else "")

    def to_json(self) -> dict[str, Any]:
        """Flat: the finding's fields, ``action``, ``why`` and ``can_go_back``."""
        return asdict(self.finding) | {"action": self.action, "why": self.why, "can_go_back": self.can_go_back}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Self:
        """The reverse of `to_json`."""
        own = {"action", "why", "can_go_back"}
        finding = {name: value for name, value in values.items() if name not in own}
        return cls(Finding(**finding), **{name: values[name] for name in own & values.keys()})


def decide(finding: Finding, config: MonitorConfig, taken: Sequence[Decision], *, can_go_back: bool = True) -> Decision:
    """What to do about a finding.

    A fault (NaN, explosion, divergence) of a kind that was acted on up to ``again_within`` steps ago, or at a later
    step that training has gone back from, takes the next graver action: skip, rollback, lower rate, stop. A skip has
    to have happened ``max_skips`` times first. Past ``max_rollbacks`` rollbacks of any kind the training stops.
    Warnings, and what no weights are in doubt for, stay as configured. Where there is nothing to go back to, the step
    is skipped instead, or the rate lowered after a divergence; where that has not helped, training stops at no number.

    Args:
        taken: earlier decisions of this training, oldest first, those that were rolled back from included.
        can_go_back: whether there is a checkpoint.
    """
    action: Action = getattr(config, finding.kind).action
    why = ""
    if finding.kind in FAULT_KINDS and action != "warn":
        recent = _recent_decisions(finding, config.again_within, taken)
        if recent and recent[-1].gravity >= ACTIONS.index(action):
            action, why = _escalate(recent, config)
    if action == "rollback" and not can_go_back:
        recent = _recent_decisions(finding, config.again_within, taken)
        skips = sum(one.action == "skip" for one in recent)
        action, why = _without_checkpoint(
            finding, _skips_did_not_help(skips, config) if skips >= config.max_skips else ""
        )
    decision = Decision(finding, action, why, can_go_back)
    rollbacks = sum(earlier.restores for earlier in taken)
    if decision.restores and rollbacks >= config.max_rollbacks:
        return Decision(finding, "stop", f"went back {rollbacks} times, and max_rollbacks is {config.max_rollbacks}")
    return decision


def _skips_did_not_help(skips: int, config: MonitorConfig) -> str:
    return f"{skips} skips in {config.again_within} steps did not help"


def _without_checkpoint(finding: Finding, tried: str) -> tuple[Action, str]:
    """What is done instead of going back; ``tried`` says what has not helped, if anything was tried."""
    why = f"{tried}, and there is no checkpoint to go back to" if tried else "there is no checkpoint to go back to"
    if tried and finding.kind == "nan":
        return "stop", why
    return "lower_rate" if tried or finding.kind == "divergence" else "skip", why


def stop_error(decision: Decision) -> WorkError:
    """The error that ends a training after the decision to stop."""
    why = f" ({decision.why})" if decision.why else ""
    return WorkError(f"training stopped at step {decision.finding.step}: {decision.finding.what}{why}")


def _recent_decisions(finding: Finding, within: int, taken: Sequence[Decision]) -> list[Decision]:
    return [one for one in taken if one.finding.kind == finding.kind and finding.step - one.finding.step <= within]


def _escalate(recent: Sequence[Decision], config: MonitorConfig) -> tuple[Action, str]:
    last = recent[-1]
    times = sum(one.action == last.action for one in recent)
    if last.action == "skip" and times < config.max_skips:
        return "skip", ""
    done = f"{last.action.replace('_', ' ')} at step {last.finding.step} did not help"
    why = _skips_did_not_help(times, config) if last.action == "skip" else done
    return ACTIONS[min(last.gravity + 1, len(ACTIONS) - 1)], why


def finite(value: float | None) -> float | None:
    """``value``, or None where it is no finite number."""
    return value if value is not None and math.isfinite(value) else None
