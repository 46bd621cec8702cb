"""The state of a training: everything its next step depends on, random generators included."""

import logging
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from posttrain.train.checkpoint.format import Checkpoint
from posttrain.train.data.batch_sampler import BatchSampler
from posttrain.train.monitor.metrics import StepValues, mean_loss
from posttrain.train.monitor.monitor import Monitor
from posttrain.train.optim.loss_scale import LossScale
from posttrain.train.optim.weights import Weights
from posttrain.train.step_hooks import StepHook

log = logging.getLogger("posttrain")

_CUDA = "random.cuda."


@dataclass
class Interventions:
    """Changes that the monitor's decisions make to the following steps.

    Args:
        skipped_steps: steps whose gradients are dropped.
        lr_scale: product of all learning-rate reductions after which training continued.
        rollback_lr_scale: product of all learning-rate reductions that came with a rollback.
        rollbacks: number of rollbacks to a checkpoint.
    """

    skipped_steps: list[int] = field(default_factory=list)
    lr_scale: float = 1.0
    rollback_lr_scale: float = 1.0
    rollbacks: int = 0

    def skip_steps(self, steps: Iterable[int]) -> None:
        """Drops the gradients of these steps whenever they are reached."""
        self.skipped_steps = sorted({*self.skipped_steps, *steps})

    @property
    def lr_factor(self) -> float:
        """The factor on every learning rate."""
        return self.lr_scale * self.rollback_lr_scale

    def after_rollback_to(self, checkpointed: "Interventions") -> "Interventions":
        """Returns the interventions that hold after a rollback to a checkpoint with ``checkpointed``."""
        # Reductions without a rollback are dropped: their steps are trained again, and decide the same again.
        return replace(self, lr_scale=checkpointed.lr_scale)

    def state(self) -> dict[str, Any]:
        """Converts to JSON."""
        return asdict(self)

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Self:
        """Restores what `state` returned."""
        return cls(**state)


@dataclass
class TrainingState:
    """The parts of a training that change from step to step.

    Args:
        weights: weights, gradients and optimiser state.
        sampler: the units of each step; an adaptive curriculum keeps its shares.
        monitor: the detectors' state and all decisions.
        interventions: changes that these decisions make to the following steps.
        loss_scale: 1 unless the precision is float16.
        hooks: optional methods that take part in each step, the outermost first.
        steps: the metrics of each step so far.
    """

    weights: Weights
    sampler: BatchSampler
    monitor: Monitor
    interventions: Interventions
    loss_scale: LossScale
    hooks: Sequence[StepHook]
    steps: list[StepValues] = field(default_factory=list)

    def has_learned(self, limit: float | None) -> bool:
        """Returns whether an epoch just ended with a mean loss below a limit; None: never."""
        if limit is None or not self.steps or self.sampler.position(len(self.steps)).epoch == self.steps[-1].epoch:
            return False
        loss = mean_loss(step for step in self.steps if step.epoch == self.steps[-1].epoch)
        if loss is None or loss >= limit:
            return False
        total = self.sampler.steps
        log.info("  loss %.2g is below train.stop_loss after %d of %d steps", loss, len(self.steps), total)
        return True

    def tensors(self) -> dict[str, Tensor]:
        """Returns weights, optimiser state and that of the hooks by name, without a copy."""
        tensors = self.weights.tensors()
        for hook in self.hooks:
            tensors |= hook.tensors()
        return tensors

    def checkpoint(self) -> Checkpoint:
        """Returns everything, random generators included, for a checkpoint."""
        state = {
            "monitor": self.monitor.state(),
            "interventions": self.interventions.state(),
            "sampler": self.sampler.state(),
            "loss_scale": self.loss_scale.state(),
        }
        return Checkpoint(self.tensors() | random_state(), state, self.steps)

    def load_weights(self, checkpoint: Checkpoint) -> None:
        """Restores weights and hooks of a checkpoint, for the end of the training."""
        self.weights.load(checkpoint.tensors)
        for hook in self.hooks:
            hook.load(checkpoint.tensors)

    def load(self, checkpoint: Checkpoint, *, resumed: bool) -> None:
        """Restores a checkpoint.

        Args:
            resumed: True in a new process; False for a rollback, which keeps its own decisions, and the interventions
                that caused it.
        """
        self.load_weights(checkpoint)
        # Sums of a step that was cut short must not reach the next one.
        self.weights.zero_grad()
        self.loss_scale.load_state(checkpoint.state["loss_scale"])
        self.sampler.load_state(checkpoint.state["sampler"], len(checkpoint.steps))
        set_random_state(checkpoint.tensors)
        # In place: the trainer and its progress hold this list.
        self.steps[:] = checkpoint.steps
        checkpointed = Interventions.from_state(checkpoint.state["interventions"])
        if resumed:
            self.monitor.load(checkpoint.state["monitor"])
            self.interventions = checkpointed
        else:
            # Without its own decisions a training would repeat the fault, and roll back, for ever.
            self.monitor.roll_back(checkpoint.state["monitor"])
            self.interventions = self.interventions.after_rollback_to(checkpointed)


def random_state() -> dict[str, Tensor]:
    """Returns the states of Python's, NumPy's, torch's and each CUDA device's generator, under ``random.*`` names.

    Training itself draws from torch's. Python's and NumPy's are kept for what a model's or a library's code may draw.
    """
    _, python_state, spare_normal = random.getstate()
    twister = np.random.get_state()
    assert isinstance(twister, tuple)
    _, key, *rest = twister
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    return {
        "random.python": torch.tensor(python_state),
        # Python draws normal numbers in pairs, and keeps the second for the next call.
        "random.python.normal": torch.tensor([] if spare_normal is None else [spare_normal], dtype=torch.float64),
        "random.numpy": torch.from_numpy(key.astype(np.int64)),
        "random.numpy.rest": torch.tensor([float(value) for value in rest], dtype=torch.float64),
        # The generator of the CPU; each CUDA device has its own.
        "random.torch": torch.get_rng_state(),
        **{f"{_CUDA}{number}": state for number, state in enumerate(cuda)},
    }


def set_random_state(tensors: Mapping[str, Tensor]) -> None:
    """Restores the generator states of `random_state`; other tensors are ignored.

    With another number of CUDA devices dropout cannot repeat itself: a warning says so.
    """
    spare_normal = tensors["random.python.normal"].tolist()
    # 3 is the version of the state that Python has written since 3.2.
    random.setstate((3, tuple(tensors["random.python"].tolist()), spare_normal[0] if spare_normal else None))
    position, has_normal, normal = tensors["random.numpy.rest"].tolist()
    key = tensors["random.numpy"].numpy().astype(np.uint32)
    np.random.set_state(("MT19937", key, int(position), int(has_normal), normal))
    torch.set_rng_state(tensors["random.torch"])
    saved = sorted(name for name in tensors if name.startswith(_CUDA))
    here = [f"{_CUDA}{number}" for number in range(torch.cuda.device_count() if torch.cuda.is_available() else 0)]
    for number, name in enumerate(here):
        if name in tensors:
            torch.cuda.set_rng_state(tensors[name], number)
    if saved != sorted(here):
        log.warning("the checkpoint is of %d CUDA devices, here are %d: dropout will differ", len(saved), len(here))
