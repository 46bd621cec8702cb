"""Starts commands, and maps functions, on the machines of a Ray cluster."""

import logging
import os
import pickle
import signal
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from posttrain.jobs.launcher import Launcher
from posttrain.jobs.map import PREFETCH, Engine, Item, Result
from posttrain.jobs.process import ProcessGroup, available_cores
from posttrain.jobs.runner import Runner
from posttrain.jobs.task import TaskFunction
from posttrain.jobs.workers import WorkerRunner
from posttrain.store.errors import UserError, WorkError
from posttrain.store.installation import install_command

_TAIL = 2000  # bytes of a command's output that are brought back

_END_SECONDS = 2.0  # that a command may take to end by itself before it is ended


class RayLauncher(Launcher):
    """Starts commands as tasks of Ray.

    Joins the cluster that ``RAY_ADDRESS`` names, or starts one on this machine. Each command takes its share of the
    processors and accelerators.

    Args:
        count: of commands at a time.

    Raises:
        UserError: Ray is not installed, or this is not a POSIX system.
    """

    def __init__(self, count: int) -> None:
        if os.name != "posix":
            raise UserError("workers need a POSIX system", where="engine", fix="use inline")
        super().__init__()
        self._ray, started = start_ray(max(count, available_cores()))
        if started:
            self.callback(self._ray.shutdown)
        self.host = self._ray.util.get_node_ip_address()
        resources = self._ray.cluster_resources()
        self._options = {
            "num_cpus": _share(resources.get("CPU", 1), count),
            "num_gpus": _share(resources.get("GPU", 0), count),
            "max_retries": 0,
        }

    def launch(self, command: Sequence[str], environment: Mapping[str, str], folder: Path) -> "RayProcess":
        task = self._ray.remote(**self._options)(_run_process)
        return RayProcess(self._ray, task.remote(list(command), dict(environment), os.getcwd()))


def _share(count: float, workers: int) -> float:
    """Returns a command's share of a resource: a whole number, or less than one."""
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
                # Ray's own process is gone, or its machine.
                self._end = -signal.SIGKILL, str(error)
        return None if self._end is None else self._end[0]

    def output(self) -> str:
        return "" if self._end is None else self._end[1]

    def peak_bytes(self) -> int:
        return 0

    def kill(self) -> None:
        # A worker ends by itself, as its connection is closed. Ray would end its own process too, which it might
        # already have given to the next worker: that one would die with it.
        if self.exit_code(_END_SECONDS) is None:
            self._ray.cancel(self._result, force=True)


def _run_process(command: list[str], environment: dict[str, str], folder: str) -> tuple[int, str]:
    """Runs a command in a process of its own; returns its exit code and the end of what it printed."""
    with tempfile.TemporaryFile() as log:
        code = ProcessGroup(command, log, folder, environment).wait()
        assert code is not None, "it was waited for"
        log.seek(max(0, log.tell() - _TAIL))
        return code, log.read().decode(errors="replace")


def start_ray(processors: int) -> tuple[Any, bool]:
    """Joins the cluster that ``RAY_ADDRESS`` names, or starts one on this machine, unless this process has one.

    Args:
        processors: of a cluster on this machine.

    Returns:
        The module, and whether there was no cluster before.

    Raises:
        UserError: Ray is not installed.
    """
    try:
        import ray
    except ImportError:
        raise UserError("Ray is not installed", where="--engine", fix=install_command("ray")) from None
    if ray.is_initialized():
        return ray, False
    local: dict[str, Any] = {"num_cpus": processors, "include_dashboard": False}
    if os.environ.get("RAY_ADDRESS"):
        local = {}  # Ray refuses a number of processors for a cluster that runs already
    handler = signal.getsignal(signal.SIGTERM)
    ray.init(log_to_driver=False, logging_level=logging.ERROR, configure_logging=True, **local)
    if threading.current_thread() is threading.main_thread() and handler is not None:
        signal.signal(signal.SIGTERM, handler)  # Ray has set its own, with which a stopped command exits with 15
    return ray, True


class RayEngine(Engine):
    """Runs items as tasks of Ray; files that they name must be visible to every node.

    Joins the cluster that ``RAY_ADDRESS`` names, or starts one on this machine.
    """

    def __init__(self, workers: int) -> None:
        super().__init__()
        self._ray, started = start_ray(workers)
        self.workers = workers
        if started:
            self.callback(self._ray.shutdown)

    def map(self, function: Callable[[Item], Result], items: Iterable[Item]) -> Iterator[Result]:
        call = self._ray.remote(max_retries=0)(_call)
        shared = [self._ray.put(function)]  # in a list, as Ray would read it for each item otherwise
        waiting: deque[Any] = deque()
        try:
            for item in items:
                waiting.append(call.remote(shared, pickle.dumps(item)))
                if len(waiting) >= self.workers * PREFETCH:
                    yield self._result(waiting.popleft())
            while waiting:
                yield self._result(waiting.popleft())
        finally:
            for reference in waiting:
                self._ray.cancel(reference)

    def _result(self, reference: Any) -> Any:
        try:
            value, error = pickle.loads(self._ray.get(reference))  # noqa: S301  # what our own worker has just sent
        except self._ray.exceptions.RayError as error:
            raise WorkError(f"a Ray worker failed: {str(error).splitlines()[0]}") from None
        if error is not None:
            raise error
        return value


_functions: dict[str, Callable[[Any], Any]] = {}


def _call(shared: list[Any], item: bytes) -> bytes:
    """Calls the function on a pickled item, and returns an exception as a value: Ray would wrap it in its own type."""
    import ray

    key = shared[0].hex()
    if key not in _functions:  # a process reads it once: it may hold an index of gigabytes
        _functions.clear()
        _functions[key] = ray.get(shared[0])
    try:
        return pickle.dumps((_functions[key](pickle.loads(item)), None))  # noqa: S301  # what our own process has sent
    except Exception as error:  # noqa: BLE001  # raised again where the result is read
        return pickle.dumps((None, error))


def ray_runner(function: TaskFunction, workers: int, silence: float) -> Runner:
    """Returns a runner whose workers Ray places on the machines of a cluster."""
    return WorkerRunner(function, RayLauncher(workers), workers, silence)
