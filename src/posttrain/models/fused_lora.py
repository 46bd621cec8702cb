"""A fused linear layer with its LoRA adapter, in place of PEFT's own where it computes the same."""

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


def fused_lora_forward(module: Any) -> Callable[..., Tensor] | None:
    """Returns a fused forward for a linear layer with a LoRA adapter; None if the module is not a plain one."""
    lora = sys.modules.get("peft.tuners.lora")  # the code that put an adapter on has loaded it
    if lora is None or type(module) is not lora.Linear or type(module.base_layer) is not nn.Linear:
        return None
    # DoRA and other variants compute something else, and several adapters would have to be added up.
    if list(module.lora_A) != module.active_adapters or len(module.lora_A) != 1 or module.lora_variant:
        return None
    original, base = module.forward, module.base_layer
    (name,) = module.lora_A
    down, up, dropout, scale = (
        part[name] for part in (module.lora_A, module.lora_B, module.lora_dropout, module.scaling)
    )
    # The backward pass below gives the base no gradient.
    if base.weight.requires_grad or down.bias is not None or up.bias is not None:
        return None

    def forward(states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        off = module.disable_adapters or module.merged
        # Whatever the fused form does not know goes to PEFT's own.
        if off or args or kwargs or states.dtype != base.weight.dtype or torch.is_autocast_enabled(states.device.type):
            output: Tensor = original(states, *args, **kwargs)
            return output
        return lora_linear(states, dropout(states), base.weight, base.bias, down.weight, up.weight, scale)

    return forward


def lora_linear(
    states: Tensor, read: Tensor, weight: Tensor, bias: Tensor | None, down: Tensor, up: Tensor, scale: float
) -> Tensor:
    """Computes ``states @ weight.T + bias + scale * read @ down.T @ up.T`` (LoRA, arXiv:2106.09685, equation 3).

    All products are in the layer's precision and accumulate in place; what both read is kept once.

    Args:
        states: [..., I].
        read: [..., I], what the adapter reads: the states themselves, or what dropout left of them.
        weight: [O, I], frozen, in the states' dtype.
        bias: [O], frozen.
        down: [R, I], in any dtype; its gradient comes in the same.
        up: [O, R], as well.
        scale: factor on the adapter's part.

    Returns:
        [..., O].
    """
    output: Tensor = _LoraLinear.apply(states, read, weight, bias, down, up, scale)  # type: ignore[no-untyped-call]
    return output


class _LoraLinear(torch.autograd.Function):
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
        # Without dropout both are one tensor, and its gradient is one sum.
        context.apart = read is not states
        adapted = read.flatten(0, -2)
        narrow = adapted @ down.to(weight.dtype).T
        output = torch.nn.functional.linear(states.flatten(0, -2), weight, bias)
        output.addmm_(narrow, up.to(weight.dtype).T, alpha=scale)
        context.save_for_backward(read, narrow, weight, down, up)
        context.scale = scale
        return output.view(*states.shape[:-1], -1)

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
