"""Engines: they map a function over items, here, in worker processes or on a Ray cluster."""

import os
import pickle
import signal
import sys
import tempfile
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, contextmanager
from functools import lru_cache
from itertools import chain, islice
from typing import Any, Literal, TypeVar, cast

from posttrain.jobs.process import available_cores
from posttrain.store.errors import UserError, WorkError, suggest
from posttrain.store.extensions import Registry

Item = TypeVar("Item")

Result = TypeVar("Result")

EngineName = Literal["auto", "inline", "processes", "ray"]

PREFETCH = 2
"""Items waiting for each worker, so that none is idle and few lie in memory."""


class Engine(ExitStack):
    """Runs a function on many items; the results are the same on every engine.

    A context, which at its end releases what the engine has put on its stack, such as workers.

    Attributes:
        workers: Number of items processed at a time.
    """

    workers: int = 1

    @abstractmethod
    def map(self, function: Callable[[Item], Result], items: Iterable[Item]) -> Iterator[Result]:
        """Yields ``function`` of each item, in the items' order; reads items as needed, a few ahead.

        Engines with other processes pickle the function, the items and the results.

        Raises:
            WorkError: a worker was killed.
            Exception: the first exception that ``function`` raised, in the items' order.
        """


class InlineEngine(Engine):
    """Runs items one after the other in this process."""

    def __init__(self, workers: int = 1) -> None:
        super().__init__()

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
        threads = os.environ.get("OMP_NUM_THREADS", str(max(1, available_cores() // workers)))
        self._pool: Any = ProcessPoolExecutor(
            workers,
            initializer=_allow_memory_growth,
            # Else each would use all cores.
            env={"OMP_NUM_THREADS": threads, "TOKENIZERS_PARALLELISM": "false"},
        )
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
                if len(waiting) >= self.workers * PREFETCH:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        except BrokenProcessPool:
            what = "a worker process was killed; free some memory or use fewer workers, and run the same command again"
            raise WorkError(what) from None
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
    # A worker that grew by 300 MB would count as leaking and be started again; a large index does not leak.
    from joblib.externals.loky import process_executor

    process_executor._MAX_MEMORY_LEAK_SIZE = sys.maxsize


@lru_cache(maxsize=1)
def _load_function(path: str) -> Callable[[Any], Any]:
    """Loads the function of a map; a process reads it once, not with every item."""
    with open(path, "rb") as file:
        return cast(Callable[[Any], Any], pickle.load(file))  # noqa: S301  # what our own process has just written


def _call(path: str, item: Any) -> Any:
    return _load_function(path)(item)


ENGINES: Registry[Callable[[int], Engine]] = Registry(
    "engine",
    "posttrain.engines",
    {"inline": InlineEngine, "processes": ProcessEngine, "ray": "posttrain.jobs.ray:RayEngine"},
)
"""A function of the number of workers, by name."""


def open_engine(name: EngineName = "auto", workers: int | None = None) -> Engine:
    """Opens an engine; ``auto`` uses processes if there is more than one core.

    Raises:
        UserError: there is no such engine, it is not installed, or the number of workers is not positive.
    """
    if workers is not None and workers < 1:
        raise UserError(f"must be at least 1, got {workers}", where="--workers")
    count = workers or available_cores()
    engine = ("inline" if count == 1 else "processes") if name == "auto" else str(name)
    if engine not in ENGINES:
        raise UserError(f"there is no engine `{name}`", where="--engine", fix=suggest(engine, ("auto", *ENGINES)))
    return ENGINES.load(engine, "--engine")(count)
