"""What the watch's decisions change in the steps that follow."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from typing import Any


@dataclass
class Course:
    """How a training goes on after what was decided.

    Args:
        left_out: steps whose gradients are dropped.
        rate_factor: what decisions that training went on after have multiplied the learning rate by.
        turned_factor: what those have that it went back after.
        turns: how often training went back to a checkpoint.
    """

    left_out: list[int] = field(default_factory=list)
    rate_factor: float = 1.0
    turned_factor: float = 1.0
    turns: int = 0

    def leave_out(self, steps: Iterable[int]) -> None:
        """Drop the gradients of these steps, whenever they are met."""
        self.left_out = sorted({*self.left_out, *steps})

    @property
    def factor(self) -> float:
        """What every learning rate is multiplied by."""
        return self.rate_factor * self.turned_factor

    def back_at(self, there: "Course") -> "Course":
        """The course after going back to a checkpoint that was taken on ``there``.

        What was decided since without going back is met and decided again.
        """
        return replace(self, rate_factor=there.rate_factor)

    def state(self) -> dict[str, Any]:
        """As JSON."""
        return asdict(self)
