"""What the detectors find, and what is done about it."""

from dataclasses import asdict, dataclass
from typing import Any, Literal, Self, get_args

from posttrain.train.watch.values import finite

Kind = Literal["nan", "explosion", "divergence", "plateau", "dead_layers", "no_supervised"]
Action = Literal["warn", "skip", "rollback", "lower_rate", "stop"]

KINDS: tuple[Kind, ...] = get_args(Kind)
ACTIONS: tuple[Action, ...] = get_args(Action)
"""From the mildest to the gravest."""

FAULTS: tuple[Kind, ...] = ("nan", "explosion", "divergence")
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
        lowers_after_fault = self.action == "lower_rate" and self.finding.kind in FAULTS
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
