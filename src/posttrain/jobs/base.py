"""The interface of an engine, which maps a function over items."""

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from typing import TypeVar

Item = TypeVar("Item")

Result = TypeVar("Result")


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
