"""The interface of an engine, which maps a function over items, and the engine that runs in this process."""

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import TypeVar

Item = TypeVar("Item")

Result = TypeVar("Result")


class Engine(AbstractContextManager["Engine"]):
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

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:  # most hold nothing
        """Stops workers and releases what the engine holds."""


class InlineEngine(Engine):
    """Runs items one after the other in this process."""

    def map(self, function: Callable[[Item], Result], items: Iterable[Item]) -> Iterator[Result]:
        return map(function, items)
