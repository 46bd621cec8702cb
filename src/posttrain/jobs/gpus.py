"""The GPUs of this machine, and the memory that a process has of one."""

import gc
import json
import logging
import os
import sys
from pathlib import Path
from typing import Any

from posttrain.jobs.process import run_command

log = logging.getLogger("posttrain")

VISIBLE = "CUDA_VISIBLE_DEVICES"
"""Environment variable that says which GPUs a process sees; AMD's runtime reads it too."""

DEVICES = Path("/dev")

_DRIVER_FILES = ("nvidia[0-9]*", "kfd")  # of NVIDIA's driver and of AMD's

_CONTEXT_BYTES = 800 << 20  # that CUDA and its libraries take beside torch's allocator: 783 MiB on an H100

# In a process of its own: one that asks CUDA keeps a context of half a gigabyte on each GPU for as long as it lives.
_QUESTION = """
import json, torch
count = torch.cuda.device_count() if torch.cuda.is_available() else 0
print(json.dumps([torch.cuda.mem_get_info(number)[0] for number in range(count)]))
"""


def has_gpu() -> bool:
    """Returns whether this machine has a GPU's driver; without starting torch."""
    return any(path for pattern in _DRIVER_FILES for path in DEVICES.glob(pattern))


def free_gpu_bytes() -> dict[str, int]:
    """Returns the free memory of each GPU that this process may use, by its value of `VISIBLE`.

    Empty where there is none, torch is not built for it, or fails to answer, which is logged. Takes seconds where there
    is one, as torch is started.
    """
    if not has_gpu():
        return {}
    answer = run_command([sys.executable, "-c", _QUESTION])
    if answer.code:
        log.warning("  the GPUs' memory is not known: %s", answer.last_error or f"exit code {answer.code}")
        return {}
    free: list[int] = json.loads(answer.output.splitlines()[-1])
    names = os.environ[VISIBLE].split(",") if os.environ.get(VISIBLE) else map(str, range(len(free)))
    return dict(zip((name.strip() for name in names), free, strict=False))


def reset_gpu_peak() -> None:
    """Frees what this process keeps of a GPU without need, and measures its peak from now on."""
    if (cuda := _cuda()) is not None:
        gc.collect()  # tensors in cycles
        cuda.empty_cache()
        cuda.reset_peak_memory_stats()


def peak_gpu_bytes() -> int:
    """Returns the most memory of a GPU that this process has had since `reset_gpu_peak`; 0 if it uses none."""
    cuda = _cuda()
    return 0 if cuda is None else cuda.max_memory_reserved() + _CONTEXT_BYTES


def _cuda() -> Any:
    """Returns torch's module of the GPU if this process uses one already."""
    torch = sys.modules.get("torch")
    return torch.cuda if torch is not None and torch.cuda.is_initialized() else None
