"""AdamW on float32 master weights, gradients summed in float32."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from posttrain.train.config import TrainConfig


class MasterAdamW:
    """AdamW (Loshchilov & Hutter 2017, arXiv:1711.05101) for weights of any precision.

    The optimiser steps float32 copies of the weights and rounds them back, so that updates smaller than a bfloat16
    step are not lost. Each micro-batch's gradient is added to a float32 sum as soon as it is ready, and its low
    precision original freed. Embeddings give the gradients of the rows that they read, not of their whole vocabulary.
    """

    def __init__(self, model: nn.Module, config: TrainConfig) -> None:
        self.names = [name for name, weight in model.named_parameters() if weight.requires_grad]
        self.weights = [weight for weight in model.parameters() if weight.requires_grad]
        self.masters = [weight if weight.dtype == torch.float32 else weight.detach().float() for weight in self.weights]
        self.clip = config.clip
        self._embeddings = [module for module in model.modules() if type(module) is nn.Embedding and not module.sparse]
        for embedding in self._embeddings:
            embedding.sparse = True
        self._hooks = []
        for weight, master in zip(self.weights, self.masters, strict=True):
            master.grad = torch.zeros_like(master)
            if weight is not master:
                self._hooks.append(weight.register_post_accumulate_grad_hook(self._add_to(master)))  # type: ignore[no-untyped-call]
        self._stale: set[Tensor] = set()  # sums that still hold the last step's gradient
        decayed = set(_decayed(model))
        groups: list[dict[str, Any]] = [
            {"params": [m for n, m in zip(self.names, self.masters, strict=True) if n in decayed]},
            {
                "params": [m for n, m in zip(self.names, self.masters, strict=True) if n not in decayed],
                "weight_decay": 0.0,
            },
        ]
        self.adam = torch.optim.AdamW(
            [group for group in groups if group["params"]],
            lr=config.learning_rate,
            betas=config.betas,
            weight_decay=config.weight_decay,
            fused=True,
        )

    @torch.no_grad()
    def step(self, rate: float) -> float:
        """Clip, step at the given rate, round back, and clear the gradients.

        Returns:
            The gradient's norm before clipping.
        """
        for master in self._stale:
            _sum(master).zero_()
        gradients = [_sum(master) for master in self.masters]
        norm = float(torch.nn.utils.get_total_norm(gradients))
        if norm > self.clip:
            torch._foreach_mul_(gradients, self.clip / (norm + 1e-6))
        for group in self.adam.param_groups:
            group["lr"] = rate
        self.adam.step()
        for weight, master in zip(self.weights, self.masters, strict=True):
            if weight is master:  # autograd adds to it by itself
                _sum(master).zero_()
            else:
                self._stale.add(master)
        self._round_back()
        return norm

    def close(self) -> None:
        """Leave the model as it was, but for its weights."""
        for hook in self._hooks:
            hook.remove()
        for embedding in self._embeddings:
            embedding.sparse = False

    def state(self) -> dict[str, Tensor]:
        """Master weights and moments by parameter name, as they are (no copy)."""
        tensors: dict[str, Tensor] = {}
        for name, master in zip(self.names, self.masters, strict=True):
            tensors[f"master.{name}"] = master.detach()
            tensors |= {f"{key}.{name}": value for key, value in self.adam.state[master].items()}
        return tensors

    @torch.no_grad()
    def load(self, tensors: dict[str, Tensor]) -> None:
        """Take over what ``state`` gave."""
        for name, master in zip(self.names, self.masters, strict=True):
            master.copy_(tensors[f"master.{name}"])
            self.adam.state[master] = {
                key: tensors[f"{key}.{name}"].to(master.device, copy=True) for key in ("step", "exp_avg", "exp_avg_sq")
            }
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


def _decayed(model: nn.Module) -> Iterable[str]:
    """Names of the matrices in linear layers; norms, biases and embeddings are not decayed."""
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    return (name for name, weight in model.named_parameters() if weight.ndim >= 2 and id(weight) not in embeddings)
