"""Float32 master weights around any optimiser: gradients summed in float32, their norm, and clipping."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from posttrain.store.errors import UserError
from posttrain.train.optim.config import OptimizerConfig
from posttrain.train.optim.offload import Offload
from posttrain.train.optim.optimizers import OptimizerState, build_optimizer
from posttrain.train.optim.parameter_groups import NamedParameter, ParameterLocation, parameter_locations

_SAMPLE_EVERY = 64


class MasterWeights:
    """Float32 copies of a model's trained weights, which the optimiser steps and rounds back.

    Owns the gradient: the float32 sums over micro-batches, their norm, and the step. Float32 weights are their own
    masters.
    """

    def __init__(self, model: nn.Module, config: OptimizerConfig) -> None:
        self.names = [name for name, weight in model.named_parameters() if weight.requires_grad]
        self.weights = [weight for weight in model.parameters() if weight.requires_grad]
        self._offload = Offload.from_accelerator(self.weights) if config.offload else None
        self.masters = self._offload.masters if self._offload else [_float32_master(weight) for weight in self.weights]
        self._embeddings = [module for module in model.modules() if type(module) is nn.Embedding and not module.sparse]
        # Sparse gradients hold the rows that were read, not the whole vocabulary.
        for embedding in self._embeddings:
            embedding.sparse = True
        masters: dict[Tensor, Tensor] = dict(zip(self.weights, self.masters, strict=True))
        # A 16-bit embedding would not show an update before it has grown to half the distance of two such numbers.
        self._hooks = [
            embedding.register_forward_hook(_use_master_rows(masters[embedding.weight]))
            for embedding in self._embeddings
            if embedding.weight in masters
        ]
        for index, (weight, master) in enumerate(zip(self.weights, self.masters, strict=True)):
            master.grad = torch.zeros_like(master)
            if weight is not master:
                # Each gradient joins its float32 sum as soon as it is ready, so that only one is in memory at a time.
                self._hooks.append(weight.register_post_accumulate_grad_hook(self._add_to(master, index)))  # type: ignore[no-untyped-call]
        self._stale: set[Tensor] = set()  # sums that still hold the last step's gradient
        where = parameter_locations(model)
        self._groups = [_layer_group(where[name]) for name in self.names]
        self.optimizer = build_optimizer(
            [
                NamedParameter(name, master, where[name].kind, where[name].depth)
                for name, master in zip(self.names, self.masters, strict=True)
            ],
            config,
        )
        self._state = OptimizerState(self.optimizer)
        self._adamw: Any = self.optimizer if type(self.optimizer) is torch.optim.AdamW else None

    @torch.no_grad()
    def finished_sums(self) -> list[Tensor]:
        """Returns the float32 gradients after a backward pass: waits for those in flight, and clears stale ones."""
        if self._offload:
            self._offload.finish()
        for master in self._stale:
            _gradient_sum(master).zero_()
        self._stale.clear()
        return [_gradient_sum(master) for master in self.masters]

    @torch.no_grad()
    def gradient_norms(self) -> dict[str, float]:
        """Returns the gradient's L2 norm by layer group, once all micro-batches of a step are summed."""
        squares: dict[str, float] = {}
        # One transfer to the host for all norms, rather than one per weight.
        norms = torch.stack(torch._foreach_norm(self.finished_sums())).tolist()
        for group, norm in zip(self._groups, norms, strict=True):
            squares[group] = squares.get(group, 0.0) + norm * norm
        return {group: math.sqrt(square) for group, square in squares.items()}

    @torch.no_grad()
    def step(self, rate: float, scale: float = 1.0) -> float | None:
        """Steps at a learning rate, with the gradients times ``scale``; rounds back, and clears the gradients.

        Returns:
            Norm of the update by that of the weights, of every 64th row of each; None if that is 0.
        """
        # Other optimisers do not divide by themselves, so that clipping is a pass over the sums.
        if scale != 1 and not self._adamw:
            torch._foreach_mul_(self.finished_sums(), scale)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        # Every 64th row says as much about the ratio as all of them, for a 64th of a pass over memory.
        samples = [_sample_rows(master) for master in self.masters]
        before = [sample.clone() for sample in samples]
        if self._adamw:  # fused AdamW divides by it while it reads the gradients, which saves a pass over memory
            self._adamw.grad_scale = torch.tensor(1 / scale) if scale != 1 else None
        self.optimizer.step()
        weights = _total_norm(before)
        torch._foreach_sub_(before, samples)
        self.zero_grad()
        self._round_back()
        return _total_norm(before) / weights if weights else None

    @torch.no_grad()
    def zero_grad(self) -> None:
        """Clears the gradients."""
        if self._offload:
            self._offload.finish()
        for weight, master in zip(self.weights, self.masters, strict=True):
            if weight is master:  # autograd adds to it by itself
                _gradient_sum(master).zero_()
            else:
                weight.grad = None  # left where memory ran out before the hook
                # Zeroed lazily: the first gradient of the next step overwrites the sum, which saves a pass.
                self._stale.add(master)

    def close(self) -> None:
        """Restores the model, but for its weights."""
        for hook in self._hooks:
            hook.remove()
        for embedding in self._embeddings:
            embedding.sparse = False

    def tensors(self) -> dict[str, Tensor]:
        """Returns master weights and optimiser state by name, without a copy."""
        masters = {f"master.{name}": tensor.detach() for name, tensor in zip(self.names, self.masters, strict=True)}
        return masters | {f"optimizer.{name}": tensor for name, tensor in self._state.tensors().items()}

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Restores what `tensors` returned; weights alone clear the optimiser's state.

        Raises:
            UserError: it is of another model or optimiser; nothing is changed.
        """
        # Everything is checked before anything is changed.
        self._check(tensors)
        own = "optimizer."
        self._state.load({name.removeprefix(own): tensor for name, tensor in tensors.items() if name.startswith(own)})
        for name, master in zip(self.names, self.masters, strict=True):
            master.copy_(tensors[f"master.{name}"])
        self._round_back()

    def _check(self, tensors: Mapping[str, Tensor]) -> None:
        """Raises a UserError unless the saved weights fit the trained ones."""
        own = {f"master.{name}": master.shape for name, master in zip(self.names, self.masters, strict=True)}
        saved = {name: tensor.shape for name, tensor in tensors.items() if name.startswith("master.")}
        for full in [*own, *saved]:
            if own.get(full) == saved.get(full):
                continue
            name, shapes = full.removeprefix("master."), (own.get(full), saved.get(full))
            here, there = ("missing" if shape is None else str(list(shape)) for shape in shapes)
            raise UserError(
                f"the checkpoint is of another model: `{name}` is {there} in it and {here} here",
                fix="train the model that it began with, or start again in another folder",
            )

    def _add_to(self, master: Tensor, index: int) -> Callable[[Tensor], None]:
        def add(weight: Tensor) -> None:
            assert weight.grad is not None
            if self._offload:
                if master in self._stale:
                    _gradient_sum(master).zero_()
                self._offload.add(index, weight.grad)
            elif master in self._stale and not weight.grad.is_sparse:
                _gradient_sum(master).copy_(weight.grad)
            else:
                if master in self._stale:
                    _gradient_sum(master).zero_()
                _gradient_sum(master).add_(weight.grad.float() if weight.grad.is_sparse else weight.grad)
            self._stale.discard(master)
            weight.grad = None

        return add

    @torch.no_grad()
    def _round_back(self) -> None:
        if self._offload:
            self._offload.round_back()
            return
        rounded = [(w, m) for w, m in zip(self.weights, self.masters, strict=True) if w is not m]
        if rounded:
            torch._foreach_copy_([weight for weight, _ in rounded], [master for _, master in rounded])


def _use_master_rows(master: Tensor) -> Callable[[nn.Module, tuple[Tensor, ...], Tensor], Tensor | None]:
    def rows(embedding: nn.Module, inputs: tuple[Tensor, ...], embedded: Tensor) -> Tensor | None:
        if embedded.dtype != torch.float32 or master.device != embedded.device:
            return None
        exact = nn.functional.embedding(inputs[0], master.detach())
        # The second term is 0: it carries the gradient to the embedding.
        return exact + (embedded - embedded.detach())

    return rows


def _float32_master(weight: Tensor) -> Tensor:
    """Returns a float32 weight itself, else a float32 copy."""
    return weight if weight.dtype == torch.float32 else weight.detach().float()


def _layer_group(location: ParameterLocation) -> str:
    """Returns the layer group that a parameter's gradient norm is reported under."""
    if location.depth is None:
        return "head"
    return "embeddings" if location.depth < 0 else f"layers.{location.depth}"


def _sample_rows(master: Tensor) -> Tensor:
    """Returns every 64th row: the ratio of norms needs no more, and costs a 64th."""
    return master.detach()[::_SAMPLE_EVERY] if master.ndim > 1 else master.detach()


def _total_norm(tensors: Sequence[Tensor]) -> float:
    return float(torch.nn.utils.get_total_norm(tensors))


def _gradient_sum(master: Tensor) -> Tensor:
    assert master.grad is not None
    return master.grad


def clip_factor(norm: float, limit: float | None) -> float:
    """Returns the factor that clips a gradient's norm, as torch's ``clip_grad_norm_`` (R. Pascanu et al., 2013,
    arXiv:1211.5063, algorithm 1).

    Args:
        norm: L2 norm of the whole model's gradient.
        limit: the largest norm; None for no limit.
    """
    return limit / (norm + 1e-6) if limit is not None and norm > limit else 1.0
