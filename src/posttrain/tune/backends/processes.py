"""Runs trials in worker processes of this machine, so that no trial takes others or the study with it."""

import os
import tempfile
from pathlib import Path
from typing import IO

from posttrain.jobs.gpus import free_gpu_bytes
from posttrain.jobs.memory import anonymous_bytes, free_bytes, peak_bytes
from posttrain.jobs.process_group import ProcessGroup
from posttrain.store.errors import UserError
from posttrain.tune.backends.base import TrialFunction
from posttrain.tune.backends.connected import ConnectedBackend


class ProcessBackend(ConnectedBackend):
    """Runs trials in processes of this machine, each on one of its GPUs; see `ConnectedBackend`.

    Args:
        function: runs a trial; pickled by value where it comes from a script.
        workers: processes.
        silence: seconds without a report after which a trial counts as hanging.

    Raises:
        UserError: the function cannot be pickled.
    """

    def __init__(self, function: TrialFunction, workers: int, silence: float = 3600.0) -> None:
        if os.name != "posix":
            raise UserError("processes need a POSIX system", where="engine", fix="use inline")
        super().__init__(function, workers, silence)
        self._gpus = free_gpu_bytes()

    def launch(self, command: list[str], environment: dict[str, str], folder: Path) -> "LocalProcess":
        return LocalProcess(command, environment)

    def available_bytes(self) -> int | None:
        free = free_bytes()
        if free is None:
            return None
        # The idle worker that takes the next job uses its memory again; what others keep is used up.
        processes = [worker.process for worker in (*self._busy.values(), *self._idle[-1:])]
        return free + sum(process.memory_bytes() for process in processes if isinstance(process, LocalProcess))


class LocalProcess:
    """A process of this machine, with all that it starts, and what it prints."""

    def __init__(self, command: list[str], environment: dict[str, str]) -> None:
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
