"""Starts commands on this machine, so that no task takes others or its runner with it."""

import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

from posttrain.jobs.gpus import free_gpu_bytes
from posttrain.jobs.launcher import Launcher, Process
from posttrain.jobs.memory import anonymous_bytes, free_bytes, peak_bytes
from posttrain.jobs.process import ProcessGroup
from posttrain.jobs.runner import Runner
from posttrain.jobs.task import TaskFunction
from posttrain.jobs.workers import WorkerRunner
from posttrain.store.errors import UserError


class LocalLauncher(Launcher):
    """Starts commands on this machine.

    Args:
        gpus: free bytes of each GPU to divide the commands among; empty: each sees all.

    Raises:
        UserError: this is not a POSIX system.
    """

    def __init__(self, gpus: Mapping[str, int] | None = None) -> None:
        if os.name != "posix":
            raise UserError("processes need a POSIX system", where="engine", fix="use inline")
        super().__init__()
        self.gpus = gpus or {}

    def launch(self, command: Sequence[str], environment: Mapping[str, str], folder: Path) -> "LocalProcess":
        return LocalProcess(command, environment)

    def available_bytes(self, processes: Sequence[Process]) -> int | None:
        free = free_bytes()
        if free is None:
            return None
        return free + sum(process.memory_bytes() for process in processes if isinstance(process, LocalProcess))


class LocalProcess:
    """A process of this machine, with all that it starts, and what it prints."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  # closed when the process is ended
        self._process = ProcessGroup(command, self._log, environment=environment)

    def exit_code(self, seconds: float) -> int | None:
        return self._process.wait(seconds)

    def output(self) -> str:
        self._log.seek(0)
        return self._log.read().decode(errors="replace")

    def peak_bytes(self) -> int:
        return peak_bytes(self._process.pid)

    def memory_bytes(self) -> int:
        """Returns the memory that is free again once the process has ended."""
        return anonymous_bytes(self._process.pid)

    def kill(self) -> None:
        self._process.kill()
        self._log.close()


def local_runner(function: TaskFunction, workers: int, silence: float) -> Runner:
    """Returns a runner with worker processes of this machine, each on one of its GPUs."""
    return WorkerRunner(function, LocalLauncher(free_gpu_bytes()), workers, silence)
