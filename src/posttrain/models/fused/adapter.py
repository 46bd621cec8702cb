"""peft's linear layers with an adapter, fused."""

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from posttrain.models.fused.low_rank import low_rank_linear


def adapted_forward(module: Any) -> Callable[..., Tensor] | None:
    """What gives what a linear layer with an adapter gives; None where the module is not one, or no plain one."""
    lora = sys.modules.get("peft.tuners.lora")  # whoever put an adapter on has loaded it
    if lora is None or type(module) is not lora.Linear or type(module.base_layer) is not nn.Linear:
        return None
    if list(module.lora_A) != module.active_adapters or len(module.lora_A) != 1 or module.lora_variant:
        return None
    own, base = module.forward, module.base_layer
    (name,) = module.lora_A
    down, up, dropout, scale = (
        part[name] for part in (module.lora_A, module.lora_B, module.lora_dropout, module.scaling)
    )
    if base.weight.requires_grad or down.bias is not None or up.bias is not None:
        return None

    def forward(states: Tensor, *given: Any, **named: Any) -> Tensor:
        off = module.disable_adapters or module.merged
        if off or given or named or states.dtype != base.weight.dtype or torch.is_autocast_enabled(states.device.type):
            found: Tensor = own(states, *given, **named)
            return found
        return low_rank_linear(states, dropout(states), base.weight, base.bias, down.weight, up.weight, scale)

    return forward
