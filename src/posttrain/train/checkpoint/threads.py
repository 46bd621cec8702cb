"""Work in threads of its own. An executor would refuse work while the interpreter exits; a thread is waited for."""

import os
import sys
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, wait
from threading import Thread, get_native_id
from typing import TypeVar

_THREADS = min(4, os.cpu_count() or 1)

Item = TypeVar("Item")
Result = TypeVar("Result")


def alongside(work: Callable[[], Result]) -> Future[Result]:
    """Start ``work`` in a thread; the future gives what it returns or raises."""
    future: Future[Result] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # noqa: BLE001 - whoever asks for the result gets it
            future.set_exception(error)

    Thread(target=run, name="checkpoint").start()
    return future


def give_way() -> None:
    """Let this thread, and those that it starts, have a core only when no other work wants it.

    On Linux; elsewhere a priority is the whole process's.
    """
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, get_native_id(), 10)


def each(work: Callable[[Item], Result], items: Iterable[Item]) -> list[Result]:
    """``work`` on every item, a few at a time; results in the order of the items. The first error is raised."""
    waiting = deque(enumerate(items))

    def some() -> list[tuple[int, Result]]:
        done = []
        while waiting:
            try:
                place, item = waiting.popleft()
            except IndexError:  # another thread was faster
                break
            done.append((place, work(item)))
        return done

    futures = [alongside(some) for _ in range(min(_THREADS, len(waiting)))]
    wait(futures)
    found = dict(pair for future in futures for pair in future.result())
    return [found[place] for place in sorted(found)]
