"""The engines: this process, worker processes of this machine, and a Ray cluster."""

import logging
import os
import pickle
import signal
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from functools import lru_cache
from itertools import chain, islice
from typing import Any, Literal, cast

from posttrain.jobs.base import Engine, Item, Result
from posttrain.store.errors import UserError, WorkError
from posttrain.store.installation import install_command

EngineName = Literal["auto", "inline", "processes", "ray"]

_PREFETCH = 2  # items waiting for each worker, so that none is idle and few lie in memory

_BLOCK_SIZE = 256  # items handed to Ray at a time, so that an endless iterable is not drained


class InlineEngine(Engine):
    """Runs items one after the other in this process."""

    def map(self, function: Callable[[Item], Result], items: Iterable[Item]) -> Iterator[Result]:
        return map(function, items)


class ProcessEngine(Engine):
    """Runs items in fresh processes, not forks: threads of this one's libraries do not survive a fork.

    They are joblib's (loky), which do not run the user's script again, as those of `multiprocessing` would.
    """

    def __init__(self, workers: int) -> None:
        super().__init__()
        self.workers = workers
        from joblib.externals.loky import ProcessPoolExecutor

        if os.name == "posix":
            # Started now: the first worker would start it inside `_block_interrupts`, and its start unblocks Ctrl-C.
            from multiprocessing import resource_tracker

            resource_tracker.ensure_running()
        self._pool: Any = ProcessPoolExecutor(workers, initializer=_allow_memory_growth)
        self.callback(self._pool.shutdown, kill_workers=True)

    def map(self, function: Callable[[Item], Result], items: Iterable[Item]) -> Iterator[Result]:
        rest = iter(items)
        first = list(islice(rest, 2))
        if len(first) < 2:  # a process takes longer to start than most items take
            yield from map(function, first)
            return
        waiting: deque[Future[Result]] = deque()
        handle, path = tempfile.mkstemp(prefix="posttrain-")
        try:
            # Here: joblib takes a tenth of a second to import, which other engines need not wait for.
            from joblib.externals.loky.backend.reduction import dump

            # Through a file, not with each item: the function may hold an index of gigabytes.
            with os.fdopen(handle, "wb") as file:
                dump(function, file)
            for item in chain(first, rest):
                with _block_interrupts():
                    waiting.append(self._pool.submit(_call, path, item))
                # Results in order, and never more in flight: an endless iterable is read only a few items ahead.
                if len(waiting) >= self.workers * _PREFETCH:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        except BrokenProcessPool:
            raise WorkError("a worker process ended before its work; run the same command to resume") from None
        except Exception:
            # Items in progress may still write to folders that the caller is about to remove.
            wait([future for future in waiting if not future.cancel()])
            raise
        finally:
            for future in waiting:
                future.cancel()
            os.unlink(path)


@contextmanager
def _block_interrupts() -> Iterator[None]:
    """Delays Ctrl-C until the context ends."""
    # Processes that start in here inherit the block: Ctrl-C on a terminal reaches the whole group, and workers would
    # each print a traceback. This process ends them itself.
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _allow_memory_growth() -> None:
    """Keeps loky from restarting workers that grow."""
    # A worker that grew by 300 MB would count as leaking and be started again; a large index is no leak.
    from joblib.externals.loky import process_executor

    process_executor._MAX_MEMORY_LEAK_SIZE = sys.maxsize


@lru_cache(maxsize=1)
def _load_function(path: str) -> Callable[[Any], Any]:
    """Loads the function of a map; a process reads it once, not with every item."""
    with open(path, "rb") as file:
        return cast(Callable[[Any], Any], pickle.load(file))  # noqa: S301  # what our own process has just written


def _call(path: str, item: Any) -> Any:
    return _load_function(path)(item)


class RayEngine(Engine):
    """Runs items as rows of a Ray dataset; files that they name must be visible to every node.

    Joins the cluster that ``RAY_ADDRESS`` names, or starts one on this machine.
    """

    def __init__(self, workers: int) -> None:
        super().__init__()
        self._ray, started = start_ray(workers)
        self.workers = workers
        import ray.data

        if started:
            self.callback(ray.shutdown)
        context = ray.data.DataContext.get_current()
        context.enable_progress_bars = False
        context.execution_options.preserve_order = True  # else rows come as they finish, and results differ by run
        logging.getLogger("ray.data").setLevel(logging.ERROR)

    def map(self, function: Callable[[Item], Result], items: Iterable[Item]) -> Iterator[Result]:
        call = _PickledCall(function)
        rest = iter(items)
        while block := list(islice(rest, _BLOCK_SIZE)):
            # As bytes: Ray would turn items into Arrow columns, and fail for types that Arrow does not have.
            rows = [{"item": pickle.dumps(item)} for item in block]
            data = self._ray.data.from_items(rows, override_num_blocks=len(rows))
            try:
                for row in data.map(call).iter_rows():
                    result, error = pickle.loads(row["result"])  # noqa: S301  # what our own worker has just sent
                    if error is not None:
                        raise error
                    yield result
            except self._ray.exceptions.RayError as error:
                raise WorkError(f"a Ray worker failed: {str(error).splitlines()[0]}") from None


class _PickledCall:
    """Calls the function on pickled items, and returns an exception as a value: Ray would wrap it in its own type."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        self.function = function

    def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        try:
            result: tuple[Any, Exception | None] = (self.function(pickle.loads(row["item"])), None)  # noqa: S301  # what our own process has sent
        except Exception as error:  # noqa: BLE001  # raised again where the result is read
            result = (None, error)
        return {"result": pickle.dumps(result)}


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
        raise UserError("Ray is not installed", where="--engine", fix=install_command("ray[data]")) from None
    if ray.is_initialized():
        return ray, False
    os.environ.setdefault("RAY_DATA_DISABLE_PROGRESS_BARS", "1")
    local: dict[str, Any] = {"num_cpus": processors, "include_dashboard": False}
    if os.environ.get("RAY_ADDRESS"):
        local = {}  # Ray refuses a number of processors for a cluster that runs already
    handler = signal.getsignal(signal.SIGTERM)
    ray.init(log_to_driver=False, logging_level=logging.ERROR, configure_logging=True, **local)
    if threading.current_thread() is threading.main_thread() and handler is not None:
        signal.signal(signal.SIGTERM, handler)  # Ray has set its own, with which a stopped command exits with 15
    return ray, True


def available_cores() -> int:
    """Returns the number of processor cores that this process may use."""
    # Not `cpu_count` where there is better: in a container it counts the host's cores.
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def open_engine(name: EngineName = "auto", workers: int | None = None) -> Engine:
    """Opens an engine; ``auto`` uses processes if there is more than one core.

    Raises:
        UserError: there is no such engine, it is not installed, or the number of workers is not positive.
    """
    if workers is not None and workers < 1:
        raise UserError(f"{workers} workers cannot work", where="--workers", fix="give at least 1")
    count = workers or available_cores()
    if name == "inline" or (name == "auto" and count == 1):
        return InlineEngine()
    if name in ("processes", "auto"):
        return ProcessEngine(count)
    if name == "ray":
        return RayEngine(count)
    raise UserError(f"there is no engine `{name}`", where="--engine", fix="auto, inline, processes or ray")
