"""A frozen linear layer with a low-rank adapter (E. Hu et al., 2021, arXiv:2106.09685, equation 3).

All products are in the layer's precision and are added up where they are wanted; what both read is kept once.
"""

from typing import Any

import torch
from torch import Tensor


def low_rank_linear(
    states: Tensor, read: Tensor, weight: Tensor, bias: Tensor | None, down: Tensor, up: Tensor, scale: float
) -> Tensor:
    """``states @ weight.T + bias + scale * read @ down.T @ up.T``.

    Args:
        states: [..., I].
        read: [..., I], what the adapter reads: the states themselves, or what dropout left of them.
        weight: [O, I], frozen, in the states' dtype.
        bias: [O], frozen.
        down: [R, I], in any dtype; its gradient comes in the same.
        up: [O, R], as well.
        scale: of the adapter's part.

    Returns:
        [..., O].
    """
    found: Tensor = _LowRankLinear.apply(states, read, weight, bias, down, up, scale)  # type: ignore[no-untyped-call]
    return found


class _LowRankLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        context: Any,
        states: Tensor,
        read: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        down: Tensor,
        up: Tensor,
        scale: float,
    ) -> Tensor:
        context.apart = read is not states
        adapted = read.flatten(0, -2)
        narrow = adapted @ down.to(weight.dtype).T
        found = torch.nn.functional.linear(states.flatten(0, -2), weight, bias)
        found.addmm_(narrow, up.to(weight.dtype).T, alpha=scale)
        context.save_for_backward(read, narrow, weight, down, up)
        context.scale = scale
        return found.view(*states.shape[:-1], -1)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Any:
        read, narrow, weight, down, up = context.saved_tensors
        above = gradient.flatten(0, -2)
        of_narrow = (above @ up.to(weight.dtype)).mul_(context.scale)
        of_up = (above.T @ narrow).to(up.dtype).mul_(context.scale)
        of_down = (of_narrow.T @ read.flatten(0, -2)).to(down.dtype)
        of_states = of_read = None
        if context.needs_input_grad[0]:
            of_states = above @ weight
            if not context.apart:
                of_states.addmm_(of_narrow, down.to(weight.dtype))
            of_states = of_states.view(read.shape)
        if context.apart and context.needs_input_grad[1]:
            of_read = (of_narrow @ down.to(weight.dtype)).view(read.shape)
        return of_states, of_read, None, None, of_down, of_up, None
