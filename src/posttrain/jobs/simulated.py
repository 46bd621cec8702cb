"""Runs no tasks: replays what they would do on a simulated clock, so that a study of days takes seconds."""

import heapq
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any

from posttrain.jobs.memory import UNKNOWN_MEMORY
from posttrain.jobs.runner import Runner
from posttrain.jobs.task import Handler, Outcome, Task, error_line

Play = Generator[tuple[float, Any], Any, Any]
"""Yields the messages of a task, each with the seconds until it comes, gets the answers, and returns the value."""


@dataclass
class _Run:
    """A run in progress, and what comes next: a message, or else the outcome."""

    play: Play
    message: Any = None
    outcome: Outcome | None = None
    seconds: float = 0.0


class SimulatedRunner(Runner):
    """Replays tasks: each message comes when the clock has reached it, and all else takes no time.

    Args:
        play: returns what a task does.
        workers: tasks at a time.
    """

    is_simulated = True

    def __init__(self, play: Callable[[Task], Play], workers: int = 1) -> None:
        super().__init__()
        self._play, self.workers = play, workers
        self._now, self._order = 0.0, 0
        self._runs: dict[int, _Run] = {}
        self._queue: list[tuple[float, int, int]] = []  # when something happens, order of equal times, task

    def start(self, task: Task) -> None:
        self._runs[task.number] = _Run(self._play(task))
        self._advance(task.number, None)
        if self._runs[task.number].outcome is not None:
            self._schedule(task.number, 0.0)

    def wait(self, handler: Handler, seconds: float | None = None) -> None:
        if seconds is not None and self._queue[0][0] > self._now + seconds:
            self._now += seconds
            return
        self._now, _, number = heapq.heappop(self._queue)
        run = self._runs[number]
        if run.outcome is None:
            self._advance(number, handler.message(number, run.message, UNKNOWN_MEMORY))
        if run.outcome is not None:
            del self._runs[number]
            handler.ended(number, run.outcome)

    def kill(self, number: int) -> None:
        self._queue = [item for item in self._queue if item[2] != number]
        heapq.heapify(self._queue)
        self._runs.pop(number, None)

    def clock(self) -> float:
        return self._now

    def _advance(self, number: int, answer: Any) -> None:
        """Continues a task with an answer, up to its next message or its end."""
        run = self._runs[number]
        try:
            seconds, run.message = run.play.send(answer)
        except StopIteration as end:
            run.outcome = Outcome("returned", end.value, seconds=run.seconds)
        except Exception as error:  # noqa: BLE001  # what the task would do is the user's own
            run.outcome = Outcome("failed", error=error_line(error), seconds=run.seconds)
        else:
            run.seconds += seconds
            self._schedule(number, seconds)

    def _schedule(self, number: int, seconds: float) -> None:
        heapq.heappush(self._queue, (self._now + seconds, self._order, number))
        self._order += 1
