"""The use of the machine: processors, memory, disk and GPUs."""

import os
import shutil
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Lock

from posttrain.jobs.process import run_command

_SAMPLE_SECONDS = 1.0
_GPU_SECONDS = 5.0
_GPU_QUERY = "--query-gpu=name,utilization.gpu,memory.used,memory.total"


@dataclass(frozen=True)
class Use:
    """A resource in use.

    Attributes:
        kind: ``cpu``, ``memory``, ``disk``, ``gpu`` or ``gpu_memory``.
        name: Name of the device, or "".
        used: Amount in use: bytes, or for processors how many of them.
        total: All there is, in the same unit.
    """

    kind: str
    name: str
    used: float
    total: float

    @property
    def share(self) -> float:
        """Returns the share in use, between 0 and 1."""
        return min(max(self.used / self.total, 0.0), 1.0) if self.total else 0.0


class SystemMonitor:
    """Reads the use of the machine; processors are measured from one reading to the next.

    Args:
        folder: A folder on the disk that counts.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._lock = Lock()
        self._times = (0.0, 0.0)
        self._busy = 0.0
        self._sampled = -_SAMPLE_SECONDS
        self._gpus: list[Use] = []
        self._gpus_read = -_GPU_SECONDS

    def read(self) -> list[Use]:
        """Returns all resources that can be read on this machine."""
        with self._lock:
            uses = [Use("cpu", "", self._processors(), float(os.cpu_count() or 1))]
            uses += [memory] if (memory := read_memory()) else []
            disk = shutil.disk_usage(self.folder)
            return [*uses, Use("disk", "", disk.used, disk.used + disk.free), *self._read_gpus()]

    def _processors(self) -> float:
        count, now = os.cpu_count() or 1, time.monotonic()
        if now - self._sampled < _SAMPLE_SECONDS:
            return self._busy
        try:
            fields = [float(field) for field in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
        except (OSError, ValueError):
            self._busy = min(os.getloadavg()[0], count)  # no Linux
            return self._busy
        # Idle and waiting for a disk are the fourth and the fifth.
        total, idle = sum(fields), fields[3] + fields[4]
        passed = total - self._times[0]
        self._busy = count * (1 - (idle - self._times[1]) / passed) if passed > 0 else self._busy
        self._times, self._sampled = (total, idle), now
        return self._busy

    def _read_gpus(self) -> list[Use]:
        # Not by torch: it would open a context on the GPU that the training uses.
        if time.monotonic() - self._gpus_read >= _GPU_SECONDS and (program := shutil.which("nvidia-smi")):
            command = [program, _GPU_QUERY, "--format=csv,noheader,nounits"]
            self._gpus = []
            with suppress(OSError, ValueError):
                answer = run_command(command, seconds=5)
                self._gpus = parse_gpus(answer.output.decode()) if answer.code == 0 else []
            self._gpus_read = time.monotonic()
        return self._gpus


def parse_gpus(output: str) -> list[Use]:
    """Parses the lines of ``nvidia-smi``: name, percent in use, MiB in use, MiB.

    Raises:
        ValueError: a line has other fields.
    """
    uses = []
    for line in output.splitlines():
        # A name may hold commas.
        name, *numbers = line.rsplit(",", 3)
        busy, used, total = (float(number) if "N/A" not in number else 0.0 for number in numbers)
        uses.append(Use("gpu", name.strip(), busy / 100, 1.0))
        uses.append(Use("gpu_memory", name.strip(), used * 2**20, total * 2**20))
    return uses


def read_memory() -> Use | None:
    """Returns the memory of this machine, or of the container if that is limited to less."""
    try:
        lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        total, free = (float(lines[name].split()[0]) * 1024 for name in ("MemTotal", "MemAvailable"))
    except (OSError, ValueError, KeyError):
        return None
    used = total - free
    try:
        group = Path("/sys/fs/cgroup")
        limit = float((group / "memory.max").read_text())
        inside = float((group / "memory.current").read_text())
        # Files that the kernel keeps in memory can be dropped at once.
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        inside -= float(stat.get("inactive_file", 0))
    except (OSError, ValueError):
        return Use("memory", "", used, total)
    return Use("memory", "", inside, limit) if limit < total else Use("memory", "", used, total)
