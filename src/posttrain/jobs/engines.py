"""Opens an engine by name: the one that runs in this process, worker processes, or a Ray cluster."""

import os
from collections.abc import Callable, Iterable, Iterator
from typing import Literal

from posttrain.jobs.base import Engine, Item, Result
from posttrain.store.errors import UserError

EngineName = Literal["auto", "inline", "processes", "ray"]


class InlineEngine(Engine):
    """Runs items one after the other in this process."""

    def map(self, function: Callable[[Item], Result], items: Iterable[Item]) -> Iterator[Result]:
        return map(function, items)


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
        from posttrain.jobs.processes import ProcessEngine

        return ProcessEngine(count)
    if name == "ray":
        from posttrain.jobs.ray import RayEngine

        return RayEngine(count)
    raise UserError(f"there is no engine `{name}`", where="--engine", fix="auto, inline, processes or ray")
