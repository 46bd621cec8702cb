"""What fresh weights do to the signals: the variance of activations and gradients, layer by layer."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from posttrain.models.language_model import LanguageModel
from posttrain.store.errors import UserError


@dataclass(frozen=True)
class Variances:
    """The hidden states that leave one layer.

    Attributes:
        layer: ``embeddings`` or the number of the layer, from 0.
        activations: variance over all tokens and channels.
        gradients: variance of the loss's gradient by them.
    """

    layer: str
    activations: float
    gradients: float

    def to_json(self) -> dict[str, Any]:
        """As JSON, which has no word for a number that is not finite: None."""
        numbers = {"activations": self.activations, "gradients": self.gradients}
        return {"layer": self.layer, **{name: one if math.isfinite(one) else None for name, one in numbers.items()}}


def variances(lm: LanguageModel, loss: Callable[[], Tensor], scale: float = 1.0) -> list[Variances]:
    """Measure the embeddings and every layer in one forward and backward pass.

    Neither weights, nor their gradients, nor the random numbers that training will draw are touched.

    Args:
        lm: the model.
        loss: the forward pass over a batch; a scalar with its graph.
        scale: what the loss was multiplied by; gradients are given without.

    Raises:
        UserError: the model has no list of layers.
    """
    layers = next((module for module in lm.decoder.modules() if isinstance(module, nn.ModuleList)), None)
    if layers is None:
        raise UserError(f"{lm.model.config.model_type} has no list of layers", where="train.initialization")
    watched = {"embeddings": lm.model.get_input_embeddings(), **{str(n): layer for n, layer in enumerate(layers)}}
    states: dict[str, Tensor] = {}
    hooks = [module.register_forward_hook(_keep(name, states)) for name, module in watched.items()]
    try:
        with torch.random.fork_rng([lm.device] if lm.device.type == "cuda" else []):
            gradients = torch.autograd.grad(loss(), [states[name] for name in watched])
    finally:
        for hook in hooks:
            hook.remove()
    return [
        Variances(name, _variance(states[name]), _variance(gradient) / scale**2)
        for name, gradient in zip(watched, gradients, strict=True)
    ]


def doubts(found: Sequence[Variances], largest_ratio: float) -> list[str]:
    """What is wrong, a line each: a variance that is no number or 0, or that changes too much from layer to layer.

    From the embeddings to the first layer anything may happen: that layer adds to embeddings of any size.

    Args:
        found: embeddings and layers, in the model's order.
        largest_ratio: of the variances of two neighbouring layers, the larger by the smaller.
    """
    lines = []
    for kind in ("activations", "gradients"):
        values = [(one.layer, getattr(one, kind)) for one in found]
        lines += [
            f"the variance of {kind} of layer {name} is {value:g}" for name, value in values if not 0 < value < math.inf
        ]
        for (below, before), (name, after) in pairwise(values[1:]):
            if 0 < before < math.inf and 0 < after < math.inf:
                ratio = after / before
                if not 1 / largest_ratio <= ratio <= largest_ratio:
                    lines.append(f"the variance of {kind} changes by {ratio:.3g} from layer {below} to layer {name}")
    return lines


def table(found: Sequence[Variances]) -> str:
    """Plain text, a line a layer, each variance with its ratio to the layer below."""
    lines = [f"{'layer':>10}  {'activations':>12} {'ratio':>8}  {'gradients':>12} {'ratio':>8}"]
    for before, one in zip([None, *found], found, strict=False):
        cells = [f"{one.layer:>10}"]
        for kind in ("activations", "gradients"):
            value, last = getattr(one, kind), getattr(before, kind, 0)
            ratio = f"{value / last:8.3g}" if last else " " * 8
            cells.append(f"{value:12.4g} {ratio}")
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def _keep(name: str, states: dict[str, Tensor]) -> Callable[..., None]:
    def hook(module: nn.Module, arguments: Any, output: Any) -> None:
        states[name] = output[0] if isinstance(output, tuple) else output

    return hook


def _variance(values: Tensor) -> float:
    return float(values.detach().float().var(correction=0))
