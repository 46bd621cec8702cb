"""Runs trials in worker processes that Ray places on the machines of a cluster."""

import os
import signal
import tempfile
from pathlib import Path
from typing import Any

from posttrain.jobs.engines import available_cores, start_ray
from posttrain.jobs.process_group import ProcessGroup
from posttrain.store.errors import UserError
from posttrain.tune.backends.base import TrialFunction
from posttrain.tune.backends.connected import ConnectedBackend

_TAIL = 2000  # bytes of a worker's output that are brought back

_END_SECONDS = 2.0  # that a worker may take to end once its connection is closed


class RayBackend(ConnectedBackend):
    """Runs trials in processes that Ray starts; see `ConnectedBackend`.

    Joins the cluster that ``RAY_ADDRESS`` names, or starts one on this machine. Each worker takes its share of the
    processors and accelerators. The study's folder must lie where every machine sees it under the same path. Workers
    connect to this machine, and prove that they know a key; what they send is not encrypted.

    Args:
        function: runs a trial; pickled by value where it comes from a script.
        workers: processes.
        silence: seconds without a report after which a trial counts as hanging.

    Raises:
        UserError: Ray is not installed, or the function cannot be pickled.
    """

    def __init__(self, function: TrialFunction, workers: int, silence: float = 3600.0) -> None:
        if os.name != "posix":
            raise UserError("workers need a POSIX system", where="engine", fix="use inline")
        self._ray, self._started = start_ray(max(workers, available_cores()))
        super().__init__(function, workers, silence, host=self._ray.util.get_node_ip_address())
        resources = self._ray.cluster_resources()
        self._options = {
            "num_cpus": _share(resources.get("CPU", 1), workers),
            "num_gpus": _share(resources.get("GPU", 0), workers),
            "max_retries": 0,
        }

    def __exit__(self, *details: Any) -> bool:
        try:
            return bool(super().__exit__(*details))
        finally:
            # After the workers' ends, which the base class has put on the stack.
            if self._started:
                self._ray.shutdown()

    def launch(self, command: list[str], environment: dict[str, str], folder: Path) -> "RayProcess":
        task = self._ray.remote(**self._options)(_run_process)
        return RayProcess(self._ray, task.remote(command, environment, os.getcwd()))


def _share(count: float, workers: int) -> float:
    """Returns a worker's share of a resource: a whole number, or less than one."""
    return count // workers if count >= workers else count / workers


class RayProcess:
    """A process that a Ray task runs, and whose exit code is the task's result."""

    def __init__(self, ray: Any, result: Any) -> None:
        self._ray, self._result = ray, result
        self._end: tuple[int, str] | None = None

    def exit_code(self, seconds: float) -> int | None:
        if self._end is None and self._ray.wait([self._result], timeout=seconds)[0]:
            try:
                self._end = self._ray.get(self._result)
            except self._ray.exceptions.RayError as error:
                # Ray's own process is gone, or its machine: the worker has seen its connection close.
                self._end = -signal.SIGKILL, str(error)
        return None if self._end is None else self._end[0]

    def output(self) -> str:
        return "" if self._end is None else self._end[1]

    def peak_bytes(self) -> int:
        return 0

    def kill(self) -> None:
        # It ends by itself, as its connection is closed. Ray would end its own process too, which it might already
        # have given to the next worker: that one would die with it.
        if self.exit_code(_END_SECONDS) is None:
            self._ray.cancel(self._result, force=True)


def _run_process(command: list[str], environment: dict[str, str], folder: str) -> tuple[int, str]:
    """Runs a command in a process of its own; returns its exit code and the end of what it printed."""
    with tempfile.TemporaryFile() as log:
        code = ProcessGroup(command, log, folder, environment).wait()
        assert code is not None, "it was waited for"
        log.seek(max(0, log.tell() - _TAIL))
        return code, log.read().decode(errors="replace")
