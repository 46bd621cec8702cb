"""The most memory that a process has had in use."""

import sys
from contextlib import suppress
from pathlib import Path

_PROCESS = Path("/proc/self")


def reset_peak_memory() -> None:
    """Begins a new measurement, where the system can (Linux)."""
    with suppress(OSError):
        (_PROCESS / "clear_refs").write_text("5")


def peak_memory() -> int:
    """Returns the most bytes of resident memory since `reset_peak_memory`, or since the process began; 0 if unknown."""
    with suppress(OSError):
        for line in (_PROCESS / "status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    try:
        import resource
    except ImportError:  # Windows
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
