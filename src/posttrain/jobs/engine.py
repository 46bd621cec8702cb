"""Engines map a function over items; `open_engine` opens one by name."""

import os
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Literal, TypeVar

from posttrain.store.errors import UserError
from posttrain.store.extensions import Registry

EngineName = Literal["auto", "inline", "processes", "ray"]

Item = TypeVar("Item")

Result = TypeVar("Result")


class Engine(AbstractContextManager["Engine"]):
    """Runs a function on many items; the results are the same on every engine.

    Attributes:
        workers: number of items processed at a time.
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


_ENGINES: Registry[Callable[[int], Engine]] = Registry(
    "engine",
    "posttrain.engines",
    {
        "processes": "posttrain.jobs.processes:ProcessEngine",
        "ray": "posttrain.jobs.ray:RayEngine",
    },
    Engine,
)


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
    name = "processes" if name == "auto" else name
    if name not in _ENGINES:
        raise UserError(f"there is no engine `{name}`", where="--engine", fix="auto, inline, processes or ray")
    return _ENGINES[name](count)
