"""Findings of the detectors, and the policy that turns a finding into an action."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, Self, get_args

from posttrain.store.errors import WorkError
from posttrain.train.monitor.metrics import finite

Kind = Literal["nan", "explosion", "divergence", "plateau", "dead_layers", "no_supervised"]

Action = Literal["warn", "skip", "rollback", "lower_rate", "stop"]

KINDS: tuple[Kind, ...] = get_args(Kind)

ACTIONS: tuple[Action, ...] = get_args(Action)
"""From the mildest to the gravest."""

Watch = Literal["strict", "normal", "off"]

POLICIES: dict[Watch, dict[Kind, Action]] = {
    "strict": {
        **dict.fromkeys(("nan", "explosion", "divergence", "no_supervised"), "stop"),
        **dict.fromkeys(("plateau", "dead_layers"), "warn"),
    },
    "normal": {
        "nan": "rollback",
        "explosion": "skip",
        "divergence": "rollback",
        "plateau": "warn",
        "dead_layers": "warn",
        "no_supervised": "skip",
    },
    "off": {},
}
"""The action on each kind of finding, by ``train.watch``; other kinds are not looked for."""

AGAIN_WITHIN = 200
"""Steps within which a further fault of a kind takes the next graver action."""

MAX_SKIPS = 5
"""Skips of one kind within these steps before it is rolled back."""

MAX_ROLLBACKS = 3
"""Rollbacks in a training; where one more is due, it stops."""

LOWER_RATE_FACTOR = 0.5
"""Factor of ``lower_rate`` on the learning rate."""

FAULT_KINDS: tuple[Kind, ...] = ("nan", "explosion", "divergence")
"""Findings after which the weights are in doubt, or about to be."""


@dataclass(frozen=True)
class Finding:
    """A fault in a step, or in the steps up to it.

    Attributes:
        what: one line for a person.
        value: the measured value; None if it is not finite or there is none.
        limit: the limit that it exceeded; None likewise.
        since: the first step in doubt, by default ``step``; a rollback returns to before it.
    """

    kind: Kind
    step: int
    what: str
    value: float | None = None
    limit: float | None = None
    since: int = -1

    def __post_init__(self) -> None:
        # JSON has no NaN and no infinity, and a finding is written to metrics and checkpoints.
        for name in ("value", "limit"):
            object.__setattr__(self, name, finite(getattr(self, name)))
        if self.since < 0:
            object.__setattr__(self, "since", self.step)


@dataclass(frozen=True)
class MonitorDecision:
    """The trainer's response to a finding.

    - ``warn``: continue.
    - ``skip``: drop this step's gradient and continue with the next batch.
    - ``rollback``: restore the last good checkpoint, and skip the data of this step.
    - ``lower_rate``: lower the learning rate from now on; after a fault, roll back as well (see `restores`).
    - ``stop``: stop the training.

    Attributes:
        why: the reason for another action than the configured one; empty if it is that one.
        can_go_back: whether there is a checkpoint.
    """

    finding: Finding
    action: Action
    why: str = ""
    can_go_back: bool = True

    @property
    def restores(self) -> bool:
        """True if the last good checkpoint is restored."""
        return self.can_go_back and self.drops_gradient and self.action in ("rollback", "lower_rate")

    @property
    def drops_gradient(self) -> bool:
        """True if the optimiser must not step with the gradient at hand."""
        lowers_after_fault = self.action == "lower_rate" and self.finding.kind in FAULT_KINDS
        return lowers_after_fault or self.action in ("skip", "rollback", "stop")

    @property
    def gravity(self) -> int:
        """Position among the actions, mildest first."""
        return ACTIONS.index(self.action)

    def line(self) -> str:
        """Formats as one line for a log."""
        action = self.action.replace("_", " ")
        return f"step {self.finding.step}: {self.finding.what}: {action}" + (f" ({self.why})" if self.why else "")

    def to_json(self) -> dict[str, Any]:
        """Converts to flat JSON: the finding's fields, ``action``, ``why`` and ``can_go_back``."""
        return asdict(self.finding) | {"action": self.action, "why": self.why, "can_go_back": self.can_go_back}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Self:
        """Restores what `to_json` returned."""
        own = {"action", "why", "can_go_back"}
        finding = {name: value for name, value in values.items() if name not in own}
        return cls(Finding(**finding), **{name: values[name] for name in own & values.keys()})


def decide(
    finding: Finding, policy: Mapping[Kind, Action], earlier: Sequence[MonitorDecision], *, can_go_back: bool = True
) -> MonitorDecision:
    """Decides what to do about a finding: the policy's action, or a graver one if that has not helped.

    A fault (NaN, explosion, divergence) of a kind that was acted on up to `AGAIN_WITHIN` steps ago, or at a later
    step that was rolled back, takes the next graver action: skip, rollback, lower rate, stop. A skip escalates only
    after `MAX_SKIPS` of them. Past `MAX_ROLLBACKS` rollbacks of any kind the training stops. Warnings, and findings
    that leave the weights sound, stay as the policy says. Without a checkpoint, the step is skipped instead, or the
    rate lowered after a divergence; if skipping NaN has not helped, training stops.

    Args:
        earlier: earlier decisions of this training, oldest first, those that were rolled back included.
        can_go_back: whether there is a checkpoint.
    """
    action = policy[finding.kind]
    why = ""
    if finding.kind in FAULT_KINDS and action != "warn":
        recent = _recent_decisions(finding, earlier)
        # What has not helped once will not help the second time, so the next graver action is due.
        if recent and recent[-1].gravity >= ACTIONS.index(action):
            action, why = _escalate(recent)
    # Early in a training, or with checkpoints off.
    if action == "rollback" and not can_go_back:
        recent = _recent_decisions(finding, earlier)
        skips = sum(previous.action == "skip" for previous in recent)
        action, why = _without_checkpoint(finding, _skips_did_not_help(skips) if skips >= MAX_SKIPS else "")
    decision = MonitorDecision(finding, action, why, can_go_back)
    rollbacks = sum(previous.restores for previous in earlier)
    # A training that keeps going back to the same checkpoint would never end.
    if decision.restores and rollbacks >= MAX_ROLLBACKS:
        return MonitorDecision(finding, "stop", f"rolled back {rollbacks} times before")
    return decision


def _skips_did_not_help(skips: int) -> str:
    return f"{skips} skips in {AGAIN_WITHIN} steps did not help"


def _without_checkpoint(finding: Finding, tried: str) -> tuple[Action, str]:
    """Chooses an action instead of a rollback; ``tried`` names what has not helped so far, if anything."""
    why = f"{tried}, and there is no checkpoint to start from" if tried else "there is no checkpoint to start from"
    # With a NaN in every step, the weights are beyond repair.
    if tried and finding.kind == "nan":
        return "stop", why
    return "lower_rate" if tried or finding.kind == "divergence" else "skip", why


def stop_error(decision: MonitorDecision) -> WorkError:
    """Returns the error that stops a training."""
    why = f" ({decision.why})" if decision.why else ""
    return WorkError(f"training stopped at step {decision.finding.step}: {decision.finding.what}{why}")


def _recent_decisions(finding: Finding, earlier: Sequence[MonitorDecision]) -> list[MonitorDecision]:
    return [
        decision
        for decision in earlier
        if decision.finding.kind == finding.kind and finding.step - decision.finding.step <= AGAIN_WITHIN
    ]


def _escalate(recent: Sequence[MonitorDecision]) -> tuple[Action, str]:
    last = recent[-1]
    times = sum(decision.action == last.action for decision in recent)
    if last.action == "skip" and times < MAX_SKIPS:
        return "skip", ""
    message = f"{last.action.replace('_', ' ')} at step {last.finding.step} did not help"
    why = _skips_did_not_help(times) if last.action == "skip" else message
    return ACTIONS[min(last.gravity + 1, len(ACTIONS) - 1)], why
