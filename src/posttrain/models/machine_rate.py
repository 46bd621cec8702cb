"""Measures how fast this machine multiplies matrices, and remembers it for later processes.

A rate is the best of several measurements at different times, since other work on the machine makes it look slower but
nothing makes it look faster. It is kept in the user's cache folder, by processor, instruction set, threads, dtype and
version of torch.
"""

from __future__ import annotations

import json
import logging
import math
import os
import platform
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from posttrain.store.user_cache import read_user_cache, write_user_cache

# No torch at import: the web report imports the meter, which imports this.
if TYPE_CHECKING:
    import torch

log = logging.getLogger("posttrain")

CPU_INFO = Path("/proc/cpuinfo")

_FIRST_SECONDS, _LATER_SECONDS = 1.0, 0.3

# Measurements in different processes until the best of them is the rate: on a quiet machine, and at all.
_QUIET_MEASUREMENTS, _MEASUREMENTS = 3, 10

# Seconds of products that are timed together: long enough to leave out bursts that no machine sustains.
_BLOCK_SECONDS = 0.05

# Larger products come closer to the peak until a cache is full; small ones first, so that a slow machine stops early.
_SIZES = {"cpu": (512, 1024, 2048), "cuda": (2048, 4096, 8192)}

# Half of the blocks this much slower than the best one: something else takes the machine's time.
_UNSTEADY = 0.2

_CACHE = "matmul"

_rates: dict[str, float] = {}  # by key, in this process


@dataclass(frozen=True)
class MatmulRate:
    """A measured rate.

    Args:
        flops: FLOP/s in square matrix products; the best so far.
        measurements: number of measurements.
        quiet: number of those on a quiet machine.
    """

    flops: float
    measurements: int = 0
    quiet: int = 0

    @property
    def settled(self) -> bool:
        """True if there are enough measurements."""
        return self.quiet >= _QUIET_MEASUREMENTS or self.measurements >= _MEASUREMENTS


def matmul_rate(dtype: torch.dtype, device: str = "cpu") -> float:
    """Returns the most FLOP/s that square matrix products reach here, with torch's current number of threads.

    The first process measures for about a second, the next two for a third of one; later ones read the best of these.
    Measurements on a busy machine do not count, and are logged while there is no other; after ten in all, the best
    holds.

    Args:
        dtype: dtype of the factors and the product.
        device: torch's name of it, such as ``cpu`` or ``cuda:0``.
    """
    name = _key(dtype, device)
    if name not in _rates:
        stored = _read(name)
        if stored is None or not stored.settled:
            stored = _measure_again(stored, dtype, device)
            _write(name, stored)
        _rates[name] = stored.flops
    return _rates[name]


def raise_matmul_rate(flops: float, dtype: torch.dtype, device: str = "cpu") -> None:
    """Raises the rate to ``flops``, which work on this machine has reached; does nothing if the rate is higher."""
    name = _key(dtype, device)
    if flops <= _rates.get(name, 0.0):
        return
    _rates[name] = flops
    stored = _read(name)
    # Two processes may write at once, and one rate is lost: its process will reach it again.
    if stored is None or flops > stored.flops:
        _write(name, MatmulRate(flops) if stored is None else replace(stored, flops=flops))


def busy_reason() -> str | None:
    """Returns why measurements are unreliable now, by the load of the last minute; None if the machine is quiet."""
    if not hasattr(os, "getloadavg"):  # Windows
        return None
    load, cores = os.getloadavg()[0], _cores()
    # This process is part of the load.
    return f"load {load:.1f} on {cores} cores" if load > cores + 1 else None


def _measure_again(stored: MatmulRate | None, dtype: torch.dtype, device: str) -> MatmulRate:
    # Before the measurement, which is itself load.
    busy = busy_reason()
    best, middle = _measure(dtype, device, _FIRST_SECONDS if stored is None else _LATER_SECONDS)
    if busy is None and middle < (1 - _UNSTEADY) * best:
        busy = f"half of the products took {best / middle:.2g} times as long as the fastest or more"
    before = stored or MatmulRate(best)
    after = MatmulRate(max(best, before.flops), before.measurements + 1, before.quiet + (busy is None))
    # Once a process, whatever it measures.
    if busy and not before.quiet and not _rates:
        log.warning("the machine is busy (%s): its peak of %.3g TFLOP/s may be too low", busy, after.flops / 1e12)
    return after


def _measure(dtype: torch.dtype, device: str, limit: float) -> tuple[float, float]:
    """Returns the best FLOP/s of all blocks of products, and the median of the blocks of the best size.

    Args:
        limit: about the seconds that it takes.
    """
    import torch

    kind = torch.device(device).type
    wait: Callable[[], None] = torch.cuda.synchronize if kind == "cuda" else lambda: None

    def seconds(count: int) -> float:
        wait()
        start = time.perf_counter()
        for _ in range(count):
            torch.mm(left, right)
        wait()
        return time.perf_counter() - start

    best = middle = 0.0
    end = time.perf_counter() + limit
    sizes = _SIZES.get(kind, _SIZES["cpu"])
    for position, size in enumerate(sizes):
        work = 2.0 * size**3
        now = time.perf_counter()
        # On a slow machine a large product alone would take longer than all the time there is.
        if best and now + 3 * work / best > end:
            break
        left = torch.randn(size, size, device=device).to(dtype)
        right = torch.randn(size, size, device=device).to(dtype)
        until = now + (end - now) / (len(sizes) - position)
        seconds(1)  # the first call allocates, and picks a kernel
        count = max(1, round(_BLOCK_SECONDS / seconds(1)))
        rates: list[float] = []
        while not rates or time.perf_counter() < until:
            rates.append(count * work / seconds(count))
        if max(rates) > best:
            best, middle = max(rates), median(rates)
    return best, middle


def _key(dtype: torch.dtype, device: str) -> str:
    """Returns everything that the rate depends on, as one line."""
    import torch

    parts: dict[str, Any] = {"dtype": str(dtype), "torch": torch.__version__}
    if torch.device(device).type == "cuda":
        parts["device"] = torch.cuda.get_device_name(device)
    else:
        parts |= {
            "device": _processor(),
            "isa": torch.backends.cpu.get_cpu_capability(),
            "limit": os.environ.get("ONEDNN_MAX_CPU_ISA", ""),
            "cores": _cores(),
            "threads": torch.get_num_threads(),
        }
    return json.dumps(parts, sort_keys=True)


def _processor() -> str:
    """Returns the processor's name and its vector instructions, which virtual machines hide from the name."""
    if not CPU_INFO.is_file():
        return f"{platform.processor()} {platform.machine()}"
    fields: dict[str, str] = {}
    for line in CPU_INFO.read_text(errors="replace").split("\n\n", 1)[0].splitlines():
        name, _, value = line.partition(":")
        fields[name.strip()] = value.strip()
    flags = (fields.get("flags") or fields.get("Features") or "").split()
    vector = sorted(flag for flag in flags if flag.startswith(("avx", "amx", "fma", "asimd", "sve", "bf16")))
    model = fields.get("model name") or fields.get("CPU part") or platform.machine()
    return " ".join([model, *vector])


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _read(name: str) -> MatmulRate | None:
    values = read_user_cache(_CACHE, name)
    try:
        rate = MatmulRate(float(values["flops"]), int(values["measurements"]), int(values["quiet"]))
    except (ValueError, KeyError, TypeError):  # of another version, or none
        return None
    return rate if math.isfinite(rate.flops) and rate.flops > 0 else None


def _write(name: str, rate: MatmulRate) -> None:
    write_user_cache(_CACHE, name, asdict(rate))
