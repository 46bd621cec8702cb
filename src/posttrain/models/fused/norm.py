"""RMSNorm (B. Zhang and R. Sennrich, 2019, arXiv:1910.07467, equation 4), which keeps its input and nothing else."""

from typing import Any

import torch
from torch import Tensor

from posttrain.models.fused.blocks import blocks


def rms_norm(states: Tensor, weight: Tensor, epsilon: float, dtype: torch.dtype) -> Tensor:
    """``weight * states / sqrt(mean(states ** 2) + epsilon)``, in float32.

    Args:
        states: [..., D].
        weight: [D].
        dtype: of the result.

    Returns:
        [..., D].
    """
    found: Tensor = _RmsNorm.apply(states, weight, epsilon, dtype)  # type: ignore[no-untyped-call]
    return found


def written_out(states: Tensor, weight: Tensor, epsilon: float, dtype: torch.dtype) -> Tensor:
    """The same as `rms_norm` in operations that a compiler fuses."""
    wide = states.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon) * weight).to(dtype)


class _RmsNorm(torch.autograd.Function):
    """With n = x / rms and p = g * n: the weight's gradient is the sum of p, x's is (g * w - n * mean(p * w)) / rms."""

    @staticmethod
    def forward(context: Any, states: Tensor, weight: Tensor, epsilon: float, dtype: torch.dtype) -> Tensor:
        rows = states.reshape(-1, states.shape[-1])
        found = torch.empty(rows.shape, dtype=dtype, device=rows.device)
        inverse = torch.empty(len(rows), 1, dtype=torch.float32, device=rows.device)
        for block in blocks(rows):
            some = rows[block].to(torch.float32, copy=True)
            scale = torch.linalg.vector_norm(some, dim=-1, keepdim=True).square_().div_(rows.shape[1])
            inverse[block] = scale.add_(epsilon).rsqrt_()
            found[block] = some.mul_(inverse[block]).mul_(weight)
        context.save_for_backward(states, weight, inverse)
        return found.view(states.shape)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Any:
        states, weight, inverse = context.saved_tensors
        width = states.shape[-1]
        rows, above = states.reshape(-1, width), gradient.reshape(-1, width)
        of_rows, wide = torch.empty_like(rows), weight.float()
        of_weight = torch.zeros(width, dtype=torch.float32, device=rows.device)
        for block in blocks(rows):
            normed = rows[block].to(torch.float32, copy=True).mul_(inverse[block])
            some = above[block].to(torch.float32, copy=True)
            product = some * normed
            of_weight += product.sum(0)
            share = torch.mv(product, wide).div_(-width)
            of_rows[block] = some.mul_(wide).addcmul_(normed, share[:, None]).mul_(inverse[block])
        return of_rows.view(states.shape), of_weight.to(weight.dtype), None, None
