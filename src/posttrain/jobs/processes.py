"""The engine that maps in worker processes of this machine."""

import os
import pickle
import signal
import sys
import tempfile
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from functools import lru_cache
from itertools import chain, islice
from typing import Any, cast

from joblib.externals.loky.backend.reduction import dump

from posttrain.jobs.base import Engine, Item, Result
from posttrain.store.errors import WorkError

_PREFETCH = 2  # items waiting for each worker, so that none is idle and few lie in memory


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
