"""AdamW with moments of 8 bits (Dettmers et al. 2021, arXiv:2110.02861), through torchao."""

import os
import shutil
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from posttrain.store.errors import UserError
from posttrain.train.optimizers.config import OptimizerConfig

_WHERE = "train.optimizer.name"
_DEVICES = ("cuda", "xpu", "cpu")


def adam8bit(groups: list[dict[str, Any]], config: OptimizerConfig) -> Optimizer:
    """torchao's AdamW with block-wise 8-bit moments; tensors under 4,096 values keep theirs in 32 bits.

    Raises:
        UserError: if torchao is not installed, or cannot compile for the tensors' device.
    """
    try:
        from torchao.optim import AdamW8bit
    except ImportError as error:
        raise UserError(
            f"adam8bit needs a package that is not installed ({error})", where=_WHERE, fix="pip install torchao"
        ) from None
    device = groups[0]["params"][0][1].device.type
    if device not in _DEVICES:
        raise UserError(f"adam8bit does not run on `{device}`", where=_WHERE, fix="use adamw or adafactor")
    if device == "cpu" and not shutil.which(os.environ.get("CXX", "g++")):
        raise UserError("adam8bit on a CPU needs a C++ compiler", where=_WHERE, fix="install g++, or use adafactor")
    optimizer: Optimizer = AdamW8bit(
        groups, lr=0.0, betas=config.betas, eps=config.eps, weight_decay=config.weight_decay
    )
    optimizer.register_step_pre_hook(_rate_as_tensor)
    return optimizer


def split(moment: Tensor) -> dict[str, Tensor]:
    """The plain tensors that an 8-bit moment consists of."""
    names, _ = moment.__tensor_flatten__()  # type: ignore[attr-defined]
    return {name: getattr(moment, name) for name in names}


def join(parts: dict[str, Tensor]) -> Tensor:
    """The 8-bit moment of a float32 master that consists of ``parts``."""
    from torchao.optim.subclass_8bit import OptimState8bit

    # Only the table of a signed moment starts below zero.
    moment: Tensor = OptimState8bit(**parts, signed=bool(parts["qmap"][0] < 0), dtype=torch.float32)
    return moment


def _rate_as_tensor(optimizer: Optimizer, *_: Any) -> None:
    """torchao takes the rate as a tensor only, lest every new rate be compiled anew."""
    for group in optimizer.param_groups:
        group["lr"] = torch.as_tensor(group["lr"], dtype=torch.float32)
