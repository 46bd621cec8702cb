"""Float32 master weights, and gradients summed in float32, around any optimiser."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from posttrain.train.optimizers.build import build
from posttrain.train.optimizers.config import OptimizerConfig
from posttrain.train.optimizers.groups import Named, places
from posttrain.train.optimizers.state import OptimizerState


class Masters:
    """The trained weights of a model of any precision.

    The optimiser steps float32 copies of the weights and rounds them back, so that updates smaller than a bfloat16
    step are not lost. Each micro-batch's gradient is added to a float32 sum as soon as it is ready, and its low
    precision original freed. Embeddings give the gradients of the rows that they read, not of their whole vocabulary.
    """

    def __init__(self, model: nn.Module, config: OptimizerConfig) -> None:
        self.names = [name for name, weight in model.named_parameters() if weight.requires_grad]
        self.weights = [weight for weight in model.parameters() if weight.requires_grad]
        self.masters = [weight if weight.dtype == torch.float32 else weight.detach().float() for weight in self.weights]
        self._embeddings = [module for module in model.modules() if type(module) is nn.Embedding and not module.sparse]
        for embedding in self._embeddings:
            embedding.sparse = True
        self._hooks = []
        for weight, master in zip(self.weights, self.masters, strict=True):
            master.grad = torch.zeros_like(master)
            if weight is not master:
                self._hooks.append(weight.register_post_accumulate_grad_hook(self._add_to(master)))  # type: ignore[no-untyped-call]
        self._stale: set[Tensor] = set()  # sums that still hold the last step's gradient
        where = places(model)
        self.optimizer = build(
            [
                Named(name, master, where[name].kind, where[name].depth)
                for name, master in zip(self.names, self.masters, strict=True)
            ],
            config,
        )
        self._state = OptimizerState(self.optimizer)

    @torch.no_grad()
    def gradient_norm(self) -> float:
        """The L2 norm of the whole gradient, once all micro-batches of a step are added up."""
        for master in self._stale:
            _sum(master).zero_()
        self._stale.clear()
        return float(torch.nn.utils.get_total_norm([_sum(master) for master in self.masters]))

    @torch.no_grad()
    def step(self, rate: float, scale: float = 1.0) -> None:
        """Step at the given rate, with the gradients multiplied by ``scale``, round back, and forget the gradients."""
        if scale < 1:
            torch._foreach_mul_([_sum(master) for master in self.masters], scale)
        for group in self.optimizer.param_groups:
            group["lr"] = rate * group["lr_scale"]
        self.optimizer.step()
        self.forget()
        self._round_back()

    @torch.no_grad()
    def forget(self) -> None:
        """Drop the gradients."""
        for weight, master in zip(self.weights, self.masters, strict=True):
            if weight is master:  # autograd adds to it by itself
                _sum(master).zero_()
            else:
                self._stale.add(master)

    def close(self) -> None:
        """Leave the model as it was, but for its weights."""
        for hook in self._hooks:
            hook.remove()
        for embedding in self._embeddings:
            embedding.sparse = False

    def tensors(self) -> dict[str, Tensor]:
        """Master weights and what the optimiser remembers, by name, as they are (no copy)."""
        masters = {f"master.{name}": one.detach() for name, one in zip(self.names, self.masters, strict=True)}
        return masters | {f"optimizer.{name}": one for name, one in self._state.tensors().items()}

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Take over what ``tensors`` gave."""
        for name, master in zip(self.names, self.masters, strict=True):
            master.copy_(tensors[f"master.{name}"])
        own = "optimizer."
        self._state.load({name.removeprefix(own): one for name, one in tensors.items() if name.startswith(own)})
        self._round_back()

    def _add_to(self, master: Tensor) -> Callable[[Tensor], None]:
        def add(weight: Tensor) -> None:
            assert weight.grad is not None
            if master in self._stale and not weight.grad.is_sparse:
                _sum(master).copy_(weight.grad)
            else:
                if master in self._stale:
                    _sum(master).zero_()
                _sum(master).add_(weight.grad.float() if weight.grad.is_sparse else weight.grad)
            self._stale.discard(master)
            weight.grad = None

        return add

    @torch.no_grad()
    def _round_back(self) -> None:
        rounded = [(w, m) for w, m in zip(self.weights, self.masters, strict=True) if w is not m]
        if rounded:
            torch._foreach_copy_([weight for weight, _ in rounded], [master for _, master in rounded])


def _sum(master: Tensor) -> Tensor:
    assert master.grad is not None
    return master.grad
