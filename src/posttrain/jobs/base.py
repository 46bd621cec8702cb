"""The interface of an engine, which maps a function over items, and the engine that runs in this process."""

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import TypeVar

Item = TypeVar("Item")

Result = TypeVar("Result")


class Engine(AbstractContextManager["Engine"]):
    """Runs a function on many items; the results are the same on every engine.

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

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:  # most hold nothing
        """Stops workers and releases what the engine holds."""


class InlineEngine(Engine):
    """Runs items one after the other in this process."""

    def map(self, function: Callable[[Item], Result], items: Iterable[Item]) -> Iterator[Result]:
        return map(function, items)
