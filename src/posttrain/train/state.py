"""The state of a training: everything its next step depends on, random generators included."""

import logging
import random
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from posttrain.train.checkpoint import Checkpoint
from posttrain.train.data.batch_sampler import BatchSampler
from posttrain.train.monitor.metrics import StepValues
from posttrain.train.monitor.monitor import Monitor
from posttrain.train.optim.ema import Ema
from posttrain.train.optim.loss_scale import LossScale
from posttrain.train.optim.master_weights import MasterWeights

log = logging.getLogger("posttrain")

_CUDA = "random.cuda."


@dataclass
class Interventions:
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

    def skip_steps(self, steps: Iterable[int]) -> None:
        """Drop the gradients of these steps, whenever they are met."""
        self.left_out = sorted({*self.left_out, *steps})

    @property
    def factor(self) -> float:
        """What every learning rate is multiplied by."""
        return self.rate_factor * self.turned_factor

    def after_rollback_to(self, there: "Interventions") -> "Interventions":
        """The course after going back to a checkpoint that was taken on ``there``.

        What was decided since without going back is met and decided again.
        """
        return replace(self, rate_factor=there.rate_factor)

    def state(self) -> dict[str, Any]:
        """As JSON."""
        return asdict(self)


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

    masters: MasterWeights
    order: BatchSampler
    watch: Monitor
    course: Interventions
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
        self.masters.zero_grad()
        if self.ema:
            self.ema.load(checkpoint.tensors)
        if self.scale and checkpoint.state["scale"]:  # a fork may have another precision
            self.scale.load_state(checkpoint.state["scale"])
        self.order.load_state(checkpoint.state["order"])
        set_random_state(checkpoint.tensors)
        self.steps[:] = checkpoint.steps
        (self.watch.load if resumed else self.watch.rolled_back)(checkpoint.state["watch"])
        there = Interventions(**checkpoint.state["course"])
        self.course = there if resumed else self.course.after_rollback_to(there)


def random_state() -> dict[str, Tensor]:
    """Where the generators of Python, NumPy, torch and each CUDA device stand, by names that begin with ``random.``."""
    _, words, waiting = random.getstate()
    twister = np.random.get_state()
    assert isinstance(twister, tuple)
    _, key, *rest = twister
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    return {
        "random.python": torch.tensor(words),
        # A second normal number is drawn with the first, and waits.
        "random.python.normal": torch.tensor([] if waiting is None else [waiting], dtype=torch.float64),
        "random.numpy": torch.from_numpy(key.astype(np.int64)),
        "random.numpy.rest": torch.tensor([float(value) for value in rest], dtype=torch.float64),
        "random.torch": torch.get_rng_state(),
        **{f"{_CUDA}{number}": state for number, state in enumerate(cuda)},
    }


def set_random_state(tensors: Mapping[str, Tensor]) -> None:
    """Put all generators where `random_state` found them; what else is in ``tensors`` is not looked at.

    On other CUDA devices than it was taken on nothing can be the same: that is said in the log.
    """
    waiting = tensors["random.python.normal"].tolist()
    random.setstate((3, tuple(tensors["random.python"].tolist()), waiting[0] if waiting else None))
    place, has_normal, normal = tensors["random.numpy.rest"].tolist()
    key = tensors["random.numpy"].numpy().astype(np.uint32)
    np.random.set_state(("MT19937", key, int(place), int(has_normal), normal))
    torch.set_rng_state(tensors["random.torch"])
    saved = sorted(name for name in tensors if name.startswith(_CUDA))
    here = [f"{_CUDA}{number}" for number in range(torch.cuda.device_count() if torch.cuda.is_available() else 0)]
    for number, name in enumerate(here):
        if name in tensors:
            torch.cuda.set_rng_state(tensors[name], number)
    if saved != sorted(here):
        log.warning("the checkpoint is of %d CUDA devices, here are %d: dropout will differ", len(saved), len(here))
