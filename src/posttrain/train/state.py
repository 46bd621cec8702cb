"""Where a training stands: all that its next step depends on, and that a checkpoint therefore holds."""

from dataclasses import dataclass, field

from torch import Tensor

from posttrain.train.checkpoint import Checkpoint
from posttrain.train.course import Course
from posttrain.train.ema import Ema
from posttrain.train.masters import Masters
from posttrain.train.order import Order
from posttrain.train.randomness import random_state, set_random_state
from posttrain.train.scaling import LossScale
from posttrain.train.watch.values import StepValues
from posttrain.train.watch.watch import Watch


@dataclass
class TrainingState:
    """The parts of a training that change from step to step.

    Args:
        masters: weights, gradients and what the optimiser remembers.
        order: which units each step meets; a curriculum that goes by losses remembers them.
        watch: what the detectors have seen.
        course: what its decisions change in the steps that follow.
        ema: averages of the weights, where they are wanted.
        scale: of the loss, with float16.
        steps: what each step so far has measured.
    """

    masters: Masters
    order: Order
    watch: Watch
    course: Course
    ema: Ema | None
    scale: LossScale | None
    steps: list[StepValues] = field(default_factory=list)

    def tensors(self) -> dict[str, Tensor]:
        """Weights, averages and the optimiser's memory by name, as they are (no copy)."""
        return self.masters.tensors() | (self.ema.tensors() if self.ema else {})

    def checkpoint(self) -> Checkpoint:
        """All of it, and the state of every random generator."""
        state = {
            "watch": self.watch.state(),
            "course": self.course.state(),
            "order": self.order.state(),
            "scale": self.scale.state() if self.scale else None,
        }
        return Checkpoint(self.tensors() | random_state(), state, self.steps)

    def load(self, checkpoint: Checkpoint, *, resumed: bool) -> None:
        """Go on where a checkpoint was taken.

        Args:
            resumed: by another process; one that goes back in its own training keeps its decisions, and of its course
                what made it go back.
        """
        self.masters.load(checkpoint.tensors)
        self.masters.forget()
        if self.ema:
            self.ema.load(checkpoint.tensors)
        if self.scale and checkpoint.state["scale"]:  # a fork may have another precision
            self.scale.load_state(checkpoint.state["scale"])
        self.order.load_state(checkpoint.state["order"])
        set_random_state(checkpoint.tensors)
        self.steps[:] = checkpoint.steps
        (self.watch.load if resumed else self.watch.rolled_back)(checkpoint.state["watch"])
        there = Course(**checkpoint.state["course"])
        self.course = there if resumed else self.course.back_at(there)
