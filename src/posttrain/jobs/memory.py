"""The memory of processes, and what is left of that of the machine or its container."""

import sys
from pathlib import Path
from typing import NamedTuple

from posttrain.jobs.gpus import peak_gpu_bytes

PROC, CGROUP = Path("/proc"), Path("/sys/fs/cgroup")


class Memory(NamedTuple):
    """The most memory that a process had in use, in bytes; 0 where that is not known.

    Attributes:
        host: of the machine.
        gpu: of a GPU.
    """

    host: int = 0
    gpu: int = 0

    def maximum(self, other: "Memory") -> "Memory":
        """Returns the larger of both, of each kind."""
        return Memory(max(self.host, other.host), max(self.gpu, other.gpu))


UNKNOWN_MEMORY = Memory()


def peak_memory() -> Memory:
    """Returns the most that this process had in use since its peaks were last reset."""
    return Memory(_peak_resident(), peak_gpu_bytes())


def _peak_resident() -> int:
    """Returns the most bytes of resident memory; 0 if unknown."""
    if peak := peak_bytes():
        return peak
    try:
        import resource
    except ImportError:  # Windows
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def process_bytes() -> int:
    """Returns the resident memory of this process in bytes; 0 where the system does not report it."""
    return _process_status("self", "VmRSS")


def peak_bytes(pid: int | None = None) -> int:
    """Returns the peak resident memory of a process, by default this one, in bytes; 0 where that is not known."""
    # Not ``ru_maxrss``, which a process inherits from the one that started it.
    return _process_status("self" if pid is None else str(pid), "VmHWM")


def anonymous_bytes(pid: int) -> int:
    """Returns the memory that is free again once a process has ended, in bytes; 0 where that is not known.

    Files that it has mapped do not count: they are in the cache, which is free already.
    """
    return _process_status(str(pid), "RssAnon")


def free_bytes() -> int | None:
    """Returns the free bytes; None where the system does not report them.

    A container's limit (cgroup version 2 or 1) counts as the machine's end. Files in the cache are free, as the system
    gives them up.
    """
    free = _read_bytes(PROC / "meminfo", "MemAvailable")
    if free is None:
        return None
    container = _cgroup_free()
    return free if container is None else min(free, container)


def _process_status(process: str, name: str) -> int:
    return _read_bytes(PROC / process / "status", name) or 0


def _read_bytes(file: Path, name: str) -> int | None:
    """Parses a line ``Name:  123 kB`` into bytes; None if there is no such file or line."""
    try:
        lines = file.read_text().splitlines()
    except OSError:  # no such system, or the process has just ended
        return None
    for line in lines:
        key, _, value = line.partition(":")
        if key == name:
            return int(value.split()[0]) << 10
    return None


def _cgroup_free() -> int | None:
    """Returns the bytes left under the container's limit, page cache counted as free; None without a limit."""
    for limit, usage, statistics, cached in (
        ("memory.max", "memory.current", "memory.stat", "file"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat", "total_cache"),
    ):
        if not (CGROUP / limit).is_file():
            continue
        text = (CGROUP / limit).read_text().strip()
        if not text.isdigit() or int(text) >= 1 << 60:  # "max", or version 1's word for none
            return None
        # Usage includes the page cache, which the kernel gives up before it kills a process.
        used = int((CGROUP / usage).read_text())
        lines = dict(line.split() for line in (CGROUP / statistics).read_text().splitlines())
        return int(text) - used + int(lines.get(cached, 0))
    return None
