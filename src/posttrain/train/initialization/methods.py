"""Initialisation methods: the distribution that a weight is drawn from."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from posttrain.store.errors import UserError
from posttrain.train.initialization.config import Method


@dataclass(frozen=True)
class Role:
    """What a weight's distribution depends on.

    Args:
        fans: number of inputs of an output, and of outputs that an input reaches; None where it is no matrix.
        layer: number of its layer, from 1; None outside of the layers.
        layers: how many there are.
        ends_block: whether it gives what a block adds to the residual stream.
    """

    fans: tuple[int, int] | None
    layer: int | None
    layers: int
    ends_block: bool


@dataclass(frozen=True)
class Distribution:
    """Mean 0 and this standard deviation, uniform or normal."""

    std: float
    uniform: bool = False

    def draw(self, shape: torch.Size, generator: torch.Generator) -> Tensor:
        """float32, on the generator's device."""
        if self.uniform:
            bound = math.sqrt(3) * self.std
            return torch.empty(shape).uniform_(-bound, bound, generator=generator)
        return torch.empty(shape).normal_(0, self.std, generator=generator)


def distribution(method: Method, gain: float, std: float, role: Role, name: str) -> Distribution:
    """What a weight is drawn from, with fans n and m.

    - ``normal``: N(0, (gain std)^2).
    - ``xavier``: uniform of variance gain^2 2 / (n + m) (X. Glorot, Y. Bengio, Understanding the difficulty of training
      deep feedforward neural networks, 2010, equation 16).
    - ``kaiming``: N(0, gain^2 2 / n) (K. He et al., 2015, arXiv:1502.01852, equation 10).
    - ``depth_scaled``: as ``normal``, divided by sqrt(2 layers) where a block ends (A. Radford et al., Language Models
      are Unsupervised Multitask Learners, 2019, section 2.3).
    - ``ds_init``: as ``xavier``, divided by sqrt(l) in layer l (B. Zhang et al., 2019, arXiv:1908.11365).
    - ``zeros``: 0.

    Raises:
        UserError: the method needs fans, and the weight is no matrix.
    """
    if method == "zeros":
        return Distribution(0.0)
    if method in ("normal", "depth_scaled"):
        shrunk = math.sqrt(2 * role.layers) if method == "depth_scaled" and role.ends_block else 1.0
        return Distribution(gain * std / shrunk)
    if role.fans is None:
        raise UserError(
            f"{method} is for matrices, and `{name}` is none", where="train.initialization", fix="use normal or zeros"
        )
    inputs, outputs = role.fans
    if method == "kaiming":
        return Distribution(gain * math.sqrt(2 / inputs))
    depth = math.sqrt(role.layer) if method == "ds_init" and role.layer else 1.0
    return Distribution(gain * math.sqrt(2 / (inputs + outputs)) / depth, uniform=True)


def fans(weight: Tensor, owner: nn.Module) -> tuple[int, int] | None:
    """How many numbers each output of a weight is a sum over, and how many outputs each input is part of.

    Args:
        weight: of a linear layer, an embedding, a convolution, or of several experts [E, ...].
        owner: the module whose parameter it is.
    """
    from transformers.pytorch_utils import Conv1D

    if weight.ndim < 2:
        return None
    if isinstance(owner, _ConvNd):
        window = math.prod(weight.shape[2:])
        return weight.shape[1] * window, weight.shape[0] // owner.groups * window
    if weight.ndim > 3:
        return None
    first, second = weight.shape[-2:]
    by_input: Any = isinstance(owner, Conv1D) or (weight.ndim == 3 and getattr(owner, "is_transposed", False))
    return (first, second) if by_input else (second, first)
