"""Chooses the dtype that models compute with: the faster one on this machine, measured once."""

import logging
import math
import os
from pathlib import Path
from typing import Literal

from posttrain.models.weight_files import read_headers
from posttrain.store.errors import UserError

log = logging.getLogger("posttrain")

Precision = Literal["auto", "bfloat16", "float32"]
ComputePrecision = Literal["bfloat16", "float32"]

COMPUTE_PRECISIONS: tuple[ComputePrecision, ...] = ("bfloat16", "float32")

# Products are not all of the work. Measured on processors without matrix units for bfloat16, a training step is 1.5
# times faster in float32 where products are only 1.2 times faster: norms, activations and copies convert each number.
_BFLOAT16_ADVANTAGE = 1.3

# Loading, activations and the cache need memory too.
_MEMORY_SHARE = 0.5


def choose_precision(weights: int | None = None) -> ComputePrecision:
    """Chooses the faster precision for models on this machine.

    An accelerator that supports bfloat16 gets it. On a CPU the rates of matrix products decide: processors with AMX
    are several times faster in bfloat16, those with AVX2 alone about ten times slower.

    Args:
        weights: Number of the model's weights; float32 is not chosen where they would take more than half of the
            memory. None: not known.
    """
    # Here, as configs import this module and start without torch.
    import torch

    from posttrain.models.machine_rate import matmul_rate

    if torch.cuda.is_available():
        return "bfloat16" if torch.cuda.is_bf16_supported(including_emulation=False) else "float32"
    full, half = matmul_rate(torch.float32, "cpu"), matmul_rate(torch.bfloat16, "cpu")
    log.debug("matrix products reach %.0f GFLOP/s in float32, %.0f in bfloat16", full / 1e9, half / 1e9)
    too_large = weights is not None and 4 * weights > _MEMORY_SHARE * _memory()
    return "bfloat16" if half >= _BFLOAT16_ADVANTAGE * full or too_large else "float32"


def count_weights(folder: Path) -> int | None:
    """Counts the weights in a folder's safetensors files by their headers; None if there are none to be read."""
    try:
        return sum(math.prod(header.shape) for header in read_headers(folder).values()) or None
    except (UserError, OSError):
        return None  # loading the model names the fault


def _memory() -> int:
    """Returns the machine's memory in bytes."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
