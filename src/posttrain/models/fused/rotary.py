"""Rotary positions (J. Su et al., 2021, arXiv:2104.09864, equation 34) of vectors whose halves are turned together."""

from typing import Any

import torch
from torch import Tensor


def rotate(states: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Turn each pair of numbers (x[i], x[i + D / 2]) by its angle.

    Args:
        states: [B, H, T, D], in any memory order.
        cosine, sine: [B or 1, 1, T, D] of the angles, the second half of D as the first.

    Returns:
        [B, H, T, D], in the same memory order.
    """
    found: Tensor = _Rotated.apply(states, cosine, sine)  # type: ignore[no-untyped-call]
    return found


class _Rotated(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, states: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        context.save_for_backward(cosine, sine)
        return _turned(states, cosine, sine, 1)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Any:
        cosine, sine = context.saved_tensors
        return _turned(gradient, cosine, sine, -1), None, None


def _turned(states: Tensor, cosine: Tensor, sine: Tensor, way: int) -> Tensor:
    half = states.shape[-1] // 2
    first, second = states[..., :half], states[..., half:]
    cosine, sine = cosine[..., :half], sine[..., :half]
    found = torch.empty_like(states)
    torch.mul(first, cosine, out=found[..., :half]).addcmul_(second, sine, value=-way)
    torch.mul(second, cosine, out=found[..., half:]).addcmul_(first, sine, value=way)
    return found
