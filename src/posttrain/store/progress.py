"""Progress of long work: a bar with rate and time left on a terminal, plain log lines elsewhere."""

import logging
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)
from rich.progress import Task as BarTask
from rich.text import Text

log = logging.getLogger("posttrain")


class Advance(Protocol):
    """Receives the number of units just finished, and a note for the line, such as ``loss 1.234``."""

    def __call__(self, count: int, note: str = "") -> None: ...


_LOG_EVERY_SECONDS = 15.0

# Of the process, not handed from function to function: the terminal has one bar, and work reports from any depth.
_open_tasks = 0

task_seconds: dict[str, float] = {}
"""Seconds spent in each task, by description, since `posttrain.store.stage_runner.run_stage` last emptied it."""


@contextmanager
def progress_bar(description: str, total: int, unit: str = "it") -> Iterator[Advance]:
    """Shows the progress of ``total`` units of work, and counts its time.

    Yields:
        A function to call with the number of units just finished.
    """
    global _open_tasks
    # An inner task is neither shown nor counted: two live bars overwrite each other, and its time is in the outer's.
    if _open_tasks:
        yield lambda count, note="": None
        return
    show = _bar if sys.stderr.isatty() and total > 1 else _lines
    start = time.monotonic()
    _open_tasks += 1
    try:
        with show(description, total, unit) as advance:
            yield advance
    finally:
        _open_tasks -= 1
        task_seconds[description] = task_seconds.get(description, 0.0) + time.monotonic() - start


class _Rate(ProgressColumn):
    def __init__(self, unit: str) -> None:
        super().__init__()
        self.unit = unit

    def render(self, task: BarTask) -> Text:
        return Text(f"{task.speed or 0:.1f} {self.unit}/s")


@contextmanager
def _bar(description: str, total: int, unit: str) -> Iterator[Advance]:
    from rich.console import Console

    columns = (
        TextColumn("  {task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        _Rate(unit),
        TextColumn("{task.fields[note]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bars:
        bar = bars.add_task(description, total=total, note="")
        yield lambda count, note="": bars.update(bar, advance=count, note=note)


@contextmanager
def _lines(description: str, total: int, unit: str) -> Iterator[Advance]:
    start = last = time.monotonic()
    done = 0

    def advance(count: int, note: str = "") -> None:
        nonlocal done, last
        done += count
        now = time.monotonic()
        # Not at the end: the caller that opened the task logs its result.
        if now - last >= _LOG_EVERY_SECONDS and 0 < done < total:
            last = now
            rate = done / (now - start)
            log.info(
                "  %s: %d/%d, %.1f %s/s, %s%.0f s left",
                description,
                done,
                total,
                rate,
                unit,
                f"{note}, " if note else "",
                (total - done) / rate,
            )

    yield advance
