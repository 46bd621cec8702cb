"""Gradient clipping: each element by value, then the whole by its norm."""

import math

import torch
from torch import Tensor


@torch.no_grad()
def clip_factor(gradients: list[Tensor], norm: float, limit: float | None, value: float | None = None) -> float:
    """Clip elements to [-value, value] in place, and say what to multiply all gradients by so that their norm fits.

    The two together are torch's ``clip_grad_value_`` and then ``clip_grad_norm_`` (R. Pascanu et al., 2013,
    arXiv:1211.5063, algorithm 1). Where nothing is beyond ``value``, no time is spent on it.

    Args:
        gradients: float32, of the whole model.
        norm: their L2 norm.
        limit: the largest norm wanted; none: any.
        value: the largest element wanted; none: as they are.
    """
    if value is not None and norm > value:  # no element is larger than the norm
        torch._foreach_clamp_max_(gradients, value)
        torch._foreach_clamp_min_(gradients, -value)
        norm = math.hypot(*torch.stack(torch._foreach_norm(gradients)).tolist())
    return limit / (norm + 1e-6) if limit is not None and norm > limit else 1.0
