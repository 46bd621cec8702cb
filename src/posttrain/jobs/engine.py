"""One small face over the places where independent pieces of work can run."""

import os
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator
from typing import Literal, TypeVar

from posttrain.store.closeable import Closeable
from posttrain.store.errors import UserError

Item = TypeVar("Item")
Result = TypeVar("Result")
Name = Literal["auto", "inline", "processes", "ray"]


class Engine(Closeable):
    """Runs a function on many items; what comes out is the same on every engine.

    Attributes:
        workers: how many items are worked on at a time.
    """

    workers: int = 1

    @abstractmethod
    def map(self, function: Callable[[Item], Result], items: Iterable[Item]) -> Iterator[Result]:
        """``function`` of each item, in the items' order; items are read as they are needed, a few ahead.

        Function, items and results are pickled where the engine has other processes.

        Raises:
            WorkError: a worker was killed.
            Exception: whatever ``function`` raised, for the first item for which it did.
        """

    def close(self) -> None:  # most hold nothing
        """Give back what the engine holds."""


class Inline(Engine):
    """One item after the other in this process."""

    def map(self, function: Callable[[Item], Result], items: Iterable[Item]) -> Iterator[Result]:
        return map(function, items)


def cores() -> int:
    """The processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def open_engine(name: Name = "auto", workers: int | None = None) -> Engine:
    """An engine by its name; ``auto`` takes processes where there is more than one core.

    Raises:
        UserError: there is no such engine, it is not installed, or the number of workers is not positive.
    """
    if workers is not None and workers < 1:
        raise UserError(f"{workers} workers cannot work", where="--workers", fix="give at least 1")
    count = workers or cores()
    if name == "inline" or (name == "auto" and count == 1):
        return Inline()
    if name in ("processes", "auto"):
        from posttrain.jobs.processes import Processes

        return Processes(count)
    if name == "ray":
        from posttrain.jobs.ray_data import RayData

        return RayData(count)
    raise UserError(f"there is no engine `{name}`", where="--engine", fix="auto, inline, processes or ray")
