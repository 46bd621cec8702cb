"""Forked processes, or threads, that work side by side on what the calling process has in memory."""

import ctypes
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

from posttrain.store.errors import WorkError

_PR_SET_PDEATHSIG = 1  # linux/prctl.h

State = TypeVar("State")
State_co = TypeVar("State_co", covariant=True)
Result = TypeVar("Result")


class Run(Protocol[State_co]):
    """Maps a function of a state over numbers, and yields results with their numbers as they come."""

    def __call__(
        self, function: Callable[[State_co, int], Result], numbers: Iterable[int]
    ) -> Iterator[tuple[int, Result]]: ...


@contextmanager
def forked_workers(
    state: State, count: int, *, threads: bool = False, prepare: Callable[[], None] | None = None
) -> Iterator[Run[State]]:
    """Yields a function that maps another one over numbers, side by side if there are several workers.

    Args:
        state: what each worker has; a process has a copy.
        count: number of workers; one is the calling thread itself.
        threads: threads in place of processes, for accelerators: a process could not inherit their context. On the
            processor torch's operations on blocks of a cache's size hardly run side by side in threads. Processes are
            forked, as those of torch's own ``DataLoader``: what they inherit need not be read again.
        prepare: called first in each process.

    Raises:
        WorkError: a process was killed.
    """
    if count == 1:
        yield lambda function, numbers: ((number, function(state, number)) for number in numbers)
        return
    if threads:
        pool: Executor = ThreadPoolExecutor(count)
    else:
        fork = multiprocessing.get_context("fork")
        pool = ProcessPoolExecutor(count, fork, _start_worker, (state, os.getpid(), prepare))

    def submit(function: Callable[[State, int], Result], number: int) -> "Future[Result]":
        return pool.submit(function, state, number) if threads else pool.submit(_call, function, number)

    def run(function: Callable[[State, int], Result], numbers: Iterable[int]) -> Iterator[tuple[int, Result]]:
        futures = {submit(function, number): number for number in numbers}
        for future in as_completed(futures):
            yield futures[future], future.result()

    try:
        yield run
    except BrokenProcessPool:
        raise WorkError("a forked process was killed; is there enough memory?") from None
    finally:
        pool.shutdown(cancel_futures=True)


def is_worker() -> bool:
    """Returns whether this process is one of a pool's."""
    return _worker_state is not None


_worker_state: Any = None


def _start_worker(state: Any, parent: int, prepare: Callable[[], None] | None) -> None:
    global _worker_state  # a pool's functions get at the state of their process in no other way
    _worker_state = state
    # Signals of the terminal reach all processes, and the parent alone decides what to do.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if sys.platform == "linux":
        # A worker whose parent was killed would wait for work forever.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    if prepare is not None:
        prepare()


def _call(function: Callable[[Any, int], Result], number: int) -> Result:
    return function(_worker_state, number)
