"""How much memory there is for a training: of an accelerator, of the machine, or of the container that it runs in."""

from pathlib import Path

import torch

_PROC, _CGROUP = Path("/proc"), Path("/sys/fs/cgroup")


def available_bytes(device: str = "cpu") -> int | None:
    """Bytes that this process may have in all, with what it has already; None where the system does not tell.

    Args:
        device: ``cpu`` or ``cuda``. A container's limit (cgroup version 2 or 1) counts as the machine's end. Files in
            the cache are free, as the system gives them up.
    """
    if torch.device(device).type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free) + torch.cuda.memory_reserved(device)
    free_now = _meminfo("MemAvailable")
    if free_now is None:
        return None
    container = _container_free()
    return (free_now if container is None else min(free_now, container)) + process_bytes()


def process_bytes() -> int:
    """Bytes of this process that are in memory now; 0 where the system does not tell."""
    return _status("VmRSS") or 0


def peak_bytes() -> int:
    """The most bytes of this process that ever were in memory; 0 where the system does not tell.

    ``ru_maxrss`` will not do: a process inherits it from the one that started it.
    """
    return _status("VmHWM") or 0


def _status(name: str) -> int | None:
    return _kilobytes(_PROC / "self" / "status", name)


def _meminfo(name: str) -> int | None:
    return _kilobytes(_PROC / "meminfo", name)


def _kilobytes(file: Path, name: str) -> int | None:
    """A line ``Name:  123 kB`` in bytes."""
    if not file.is_file():
        return None
    for line in file.read_text().splitlines():
        key, _, value = line.partition(":")
        if key == name:
            return int(value.split()[0]) << 10
    return None


def _container_free() -> int | None:
    """What the container's limit leaves, cached files counted as free; None without a limit."""
    for limit, usage, statistics, cached in (
        ("memory.max", "memory.current", "memory.stat", "file"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat", "total_cache"),
    ):
        if not (_CGROUP / limit).is_file():
            continue
        text = (_CGROUP / limit).read_text().strip()
        if not text.isdigit() or int(text) >= 1 << 60:  # "max", or version 1's word for none
            return None
        used = int((_CGROUP / usage).read_text())
        lines = dict(line.split() for line in (_CGROUP / statistics).read_text().splitlines())
        return int(text) - used + int(lines.get(cached, 0))
    return None
