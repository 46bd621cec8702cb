"""What the watch's decisions change in the steps that follow."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass
class Course:
    """How a training goes on after what was decided.

    Args:
        left_out: steps whose gradients are dropped.
        rate_factor: what every learning rate is multiplied by.
        turns: how often training went back to a checkpoint.
    """

    left_out: list[int] = field(default_factory=list)
    rate_factor: float = 1.0
    turns: int = 0

    def leave_out(self, steps: Iterable[int]) -> None:
        """Drop the gradients of these steps, whenever they are met."""
        self.left_out = sorted({*self.left_out, *steps})

    def state(self) -> dict[str, Any]:
        """As JSON."""
        return asdict(self)
