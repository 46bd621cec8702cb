"""Variances of activations and gradients by layer, before the first step of a training from scratch."""

import json
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from posttrain.models.language_model import LanguageModel
from posttrain.models.packing import Packed, Unit, pack
from posttrain.store.errors import UserError
from posttrain.store.files import write_atomically
from posttrain.train.data.units import group_by_tokens
from posttrain.train.out_of_memory import run_in_groups

log = logging.getLogger("posttrain")

_LOSS_SCALE = 1024.0  # of the loss, so that float16 can hold the gradients

_LARGEST_RATIO = 10.0
"""Largest ratio of the variances of two neighbouring layers without a warning."""


def activation_stats(
    lm: LanguageModel,
    units: Sequence[Unit],
    rows: Sequence[int],
    loss: Callable[[Packed, list[int], float], Tensor],
    *,
    float16: bool,
    budget: int,
    padded: bool,
    file: Path,
) -> list[dict[str, Any]]:
    """Measures the variance of activations and gradients by layer on the first micro-batch, and logs it as a table.

    `variance_warnings` follow.

    Args:
        units: the training set.
        rows: units of the first step.
        loss: the mean loss of a micro-batch, of these rows, multiplied by a factor; with its graph.
        float16: whether the loss is multiplied so that float16 can hold the gradients.
        budget: tokens of a micro-batch at most.
        padded: whether the model needs padded rows.
        file: keeps the result; an existing one is read instead of measured again.

    Returns:
        ``layer``, ``activations`` and ``gradients`` of the embeddings and each layer.
    """
    # A resumed training has moved on: its own variances would not be those of the first step.
    if not file.exists():
        scale = _LOSS_SCALE if float16 else 1.0

        def measure(group: Sequence[int]) -> list[LayerVariance]:
            packed, first = pack([units[row] for row in group], lm.device, padded=padded), list(group)
            return layer_variances(lm, lambda: loss(packed, first, scale), scale)

        _, layers = next(run_in_groups(units, group_by_tokens(units, rows, budget), measure))
        log.info(
            "variance of activations and of gradients by layer, before the first step:\n%s", variance_table(layers)
        )
        for warning in variance_warnings(layers):
            log.warning("  %s", warning)
        write_atomically(file, json.dumps([layer.to_json() for layer in layers]).encode())
    stats: list[dict[str, Any]] = json.loads(file.read_bytes())
    return stats


@dataclass(frozen=True)
class LayerVariance:
    """The variance of one layer's output and of its gradient.

    Attributes:
        layer: ``embeddings`` or the number of the layer, from 0.
        activations: variance over all tokens and channels.
        gradients: variance of the loss's gradient by them.
    """

    layer: str
    activations: float
    gradients: float

    def to_json(self) -> dict[str, Any]:
        """Converts to JSON; NaN and infinities become None."""
        numbers = {"activations": self.activations, "gradients": self.gradients}
        return {
            "layer": self.layer,
            **{name: variance if math.isfinite(variance) else None for name, variance in numbers.items()},
        }


def layer_variances(lm: LanguageModel, loss: Callable[[], Tensor], scale: float = 1.0) -> list[LayerVariance]:
    """Measures the embeddings and every layer in one forward and backward pass.

    Neither weights, nor their gradients, nor the random numbers that training will draw are touched.

    Args:
        lm: the model.
        loss: the forward pass over a batch; a scalar with its graph.
        scale: factor on the loss; the gradients are given without it.

    Raises:
        UserError: the model has no list of layers.
    """
    layers = next((module for module in lm.decoder.modules() if isinstance(module, nn.ModuleList)), None)
    if layers is None:
        raise UserError(f"{lm.model.config.model_type} has no list of layers", where="train.initialization")
    watched = {"embeddings": lm.model.get_input_embeddings(), **{str(n): layer for n, layer in enumerate(layers)}}
    states: dict[str, Tensor] = {}
    hooks = [module.register_forward_hook(_record_output(name, states)) for name, module in watched.items()]
    try:
        with torch.random.fork_rng([lm.device] if lm.device.type == "cuda" else []):
            # Not `backward`, which would leave gradients in the weights.
            gradients = torch.autograd.grad(loss(), [states[name] for name in watched])
    finally:
        for hook in hooks:
            hook.remove()
    return [
        # A variance grows with the square of the factor on the loss.
        LayerVariance(name, _variance(states[name]), _variance(gradient) / scale**2)
        for name, gradient in zip(watched, gradients, strict=True)
    ]


def variance_warnings(layers: Sequence[LayerVariance]) -> list[str]:
    """Returns a warning for each variance that is 0, not finite, or changes tenfold from layer to layer.

    From the embeddings to the first layer anything may happen: that layer adds to embeddings of any size.

    Args:
        layers: embeddings and layers, in the model's order.
    """
    lines = []
    for kind in ("activations", "gradients"):
        values = [(layer.layer, getattr(layer, kind)) for layer in layers]
        lines += [
            f"the variance of {kind} of layer {name} is {value:g}" for name, value in values if not 0 < value < math.inf
        ]
        for (below, before), (name, after) in pairwise(values[1:]):
            if 0 < before < math.inf and 0 < after < math.inf:
                ratio = after / before
                if not 1 / _LARGEST_RATIO <= ratio <= _LARGEST_RATIO:
                    lines.append(f"the variance of {kind} changes by {ratio:.3g} from layer {below} to layer {name}")
    return lines


def variance_table(layers: Sequence[LayerVariance]) -> str:
    """Formats as text, a line a layer, with the ratio of each variance to the layer below."""
    lines = [f"{'layer':>10}  {'activations':>12} {'ratio':>8}  {'gradients':>12} {'ratio':>8}"]
    for before, layer in zip([None, *layers], layers, strict=False):
        cells = [f"{layer.layer:>10}"]
        for kind in ("activations", "gradients"):
            value, last = getattr(layer, kind), getattr(before, kind, 0)
            ratio = f"{value / last:8.3g}" if last else " " * 8
            cells.append(f"{value:12.4g} {ratio}")
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def _record_output(name: str, states: dict[str, Tensor]) -> Callable[..., None]:
    def hook(module: nn.Module, arguments: Any, output: Any) -> None:
        states[name] = output[0] if isinstance(output, tuple) else output

    return hook


def _variance(values: Tensor) -> float:
    # In float32: squares of small float16 gradients underflow.
    return float(values.detach().float().var(correction=0))
