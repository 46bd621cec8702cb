"""Put the fused operations in the place of a model's own, where they give what those give."""

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor

from posttrain.models.fused.norm import rms_norm
from posttrain.models.fused.rotary import rotate
from posttrain.models.language_model import LanguageModel
from posttrain.models.layers import with_forward
from posttrain.models.shape import is_norm

_ROTATION = "apply_rotary_pos_emb"
"""What transformers' models call their own copy of the same function."""


@contextmanager
def fused(lm: LanguageModel) -> Iterator[None]:
    """Have a model on a CPU run its norms and rotations fused, and leave it as it was.

    What takes an operation's place has been compared with it on a few numbers; what is not known stays. Other devices
    have kernels of their own.
    """
    with ExitStack() as changed:
        if lm.device.type == "cpu":
            for module in lm.decoder.modules():
                if is_norm(module) and (forward := _fused_norm(module)):
                    changed.enter_context(with_forward(module, forward))
            for home in {sys.modules[type(module).__module__] for module in lm.decoder.modules()}:
                if hasattr(home, _ROTATION):
                    changed.enter_context(_rotating(home))
        yield


def _fused_norm(module: Any) -> Callable[[Tensor], Tensor] | None:
    """What gives what a norm gives; None where nothing here does."""
    own = module.forward
    epsilon = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if epsilon is None or [name for name, _ in module.named_parameters()] != ["weight"]:
        return None

    def forward(states: Tensor) -> Tensor:
        if states.dtype != module.weight.dtype:
            found: Tensor = own(states)
            return found
        return rms_norm(states, module.weight, epsilon)

    return forward if _agree(module, forward) else None


@torch.no_grad()
def _agree(module: Any, forward: Callable[[Tensor], Tensor]) -> bool:
    probe = torch.linspace(-2, 2, 2 * len(module.weight)).view(1, 2, -1).to(module.weight.dtype)
    return torch.allclose(module(probe), forward(probe), rtol=0.02, atol=1e-6)


@contextmanager
def _rotating(home: Any) -> Iterator[None]:
    """Replace the function by which a module of transformers rotates queries and keys."""
    own = getattr(home, _ROTATION)

    def turned(
        queries: Tensor, keys: Tensor, cosine: Tensor, sine: Tensor, unsqueeze_dim: int = 1
    ) -> tuple[Tensor, Tensor]:
        if cosine.shape[-1] != queries.shape[-1] or cosine.dtype != queries.dtype:
            found: tuple[Tensor, Tensor] = own(queries, keys, cosine, sine, unsqueeze_dim=unsqueeze_dim)
            return found
        angles = cosine.unsqueeze(unsqueeze_dim), sine.unsqueeze(unsqueeze_dim)
        return rotate(queries, *angles), rotate(keys, *angles)

    if list(inspect.signature(own).parameters) != ["q", "k", "cos", "sin", "unsqueeze_dim"] or not _turn(own, turned):
        yield
        return
    setattr(home, _ROTATION, turned)
    try:
        yield
    finally:
        setattr(home, _ROTATION, own)


def _turn(own: Callable[..., Any], other: Callable[..., Any]) -> bool:
    """Whether two rotations agree."""
    angles = torch.arange(12.0).view(1, 3, 4).repeat(1, 1, 2)
    probe = torch.linspace(-2, 2, 48).view(1, 2, 3, 8), torch.linspace(-1, 3, 24).view(1, 1, 3, 8)
    found = zip(own(*probe, angles.cos(), angles.sin()), other(*probe, angles.cos(), angles.sin()), strict=True)
    return all(torch.allclose(one, two, atol=1e-6) for one, two in found)
