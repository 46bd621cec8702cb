"""Training checkpoints: parameters, learning rate and Adam moments."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self

import torch
from torch import Tensor

from posttrain.attribution.influence.functional_model import FunctionalModel
from posttrain.attribution.influence.gradients import record_gradients
from posttrain.store.errors import UserError

_CONVERGED_STEPS = 10**6  # so many that bias correction divides by 1


@dataclass(frozen=True, eq=False)
class AdamMoments:
    """Adam's moments, and the update that it would apply for one record alone.

    Attributes:
        first, second: its running means of the gradient and of its square, [P] in the model's order, not corrected.
        steps: taken so far.
        beta1, beta2, epsilon: its settings.
    """

    first: Tensor
    second: Tensor
    steps: int
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8

    @classmethod
    def from_optimizer(cls, model: FunctionalModel, optimizer: torch.optim.Optimizer) -> Self:
        """Reads the moments of the model's parameters from torch's Adam or AdamW.

        Raises:
            UserError: the optimiser is another, or has taken no step with one of the parameters.
        """
        names = {id(value): name for name, value in model.module.named_parameters()}
        first, second, steps, settings = {}, {}, 0, {}
        for group in optimizer.param_groups:
            for value in group["params"]:
                state = optimizer.state.get(value, {})
                if names.get(id(value)) in model.parameters and "exp_avg_sq" in state:
                    name = names[id(value)]
                    first[name], second[name] = state["exp_avg"], state["exp_avg_sq"]
                    steps = int(state["step"])
                    settings = {"beta1": group["betas"][0], "beta2": group["betas"][1], "epsilon": group["eps"]}
        if missing := [name for name in model.parameters if name not in first]:
            raise UserError(f"the optimiser holds no moments of Adam for {missing[0]}", where="influence.checkpoints")
        return cls(model.flat(first).clone(), model.flat(second).clone(), steps, **settings)

    @classmethod
    def from_records(cls, model: FunctionalModel, records: Sequence[Any], block_size: int | None = None) -> Self:
        """Estimates the moments of a training whose optimiser is gone.

        They are the limit for batches of one of these records each at constant weights: the mean of the records'
        gradients and of their squares.

        Raises:
            UserError: there are no records, or a gradient is not finite.
        """
        first = torch.zeros(model.size, dtype=torch.float64)
        second = torch.zeros_like(first)
        for _, gradients in record_gradients(model, records, block_size):
            first += gradients.sum(0, dtype=torch.float64).cpu()
            second += gradients.square().sum(0, dtype=torch.float64).cpu()
        first, second = ((total / len(records)).to(model.device, model.dtype) for total in (first, second))
        return cls(first, second, _CONVERGED_STEPS)

    def __call__(self, gradients: Tensor) -> Tensor:
        """Returns Adam's next update, over the learning rate, if each gradient of [B, P] were a batch's: [B, P].

        M. Xia et al. 2024 (arXiv:2402.04333, section 3.1).
        """
        first = (self.beta1 * self.first + (1 - self.beta1) * gradients) / (1 - self.beta1 ** (self.steps + 1))
        second = (self.beta2 * self.second + (1 - self.beta2) * gradients**2) / (1 - self.beta2 ** (self.steps + 1))
        # The paper has epsilon inside the root; torch, which trained the model, has it outside.
        return first / (second.sqrt() + self.epsilon)

    @cached_property
    def key(self) -> str:
        """Identifies the moments and settings."""
        checksum = hashlib.sha256(repr((self.steps, self.beta1, self.beta2, self.epsilon)).encode())
        for moment in (self.first, self.second):
            checksum.update(moment.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
        return checksum.hexdigest()


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """A point of a training.

    Attributes:
        parameters: by name, the model's among them, such as ``model.state_dict()``; copied.
        rate: the learning rate there; the sum of several steps' if it stands for these.
        adam: for LESS.
    """

    parameters: Mapping[str, Tensor]
    rate: float
    adam: AdamMoments | None = None

    def __post_init__(self) -> None:
        # A state dict's tensors are the model's own, which training keeps changing.
        copied = {name: value.detach().clone() for name, value in self.parameters.items()}
        object.__setattr__(self, "parameters", copied)


def check_checkpoints(checkpoints: Sequence[Checkpoint]) -> None:
    """Raises a UserError unless there is a checkpoint and each has a learning rate above 0."""
    if not checkpoints:
        raise UserError("there are no checkpoints", where="influence.checkpoints")
    for number, checkpoint in enumerate(checkpoints, 1):
        if not 0 < checkpoint.rate < float("inf"):
            raise UserError(
                f"the learning rate of checkpoint {number} must be above 0, not {checkpoint.rate}",
                where="influence.checkpoints",
            )
