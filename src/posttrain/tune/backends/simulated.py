"""Runs no trials: replays learning curves on a simulated clock, so that a study of days takes seconds."""

import heapq
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any, Literal, NamedTuple

from posttrain.tune.backends.base import Backend, Handler, Job, Outcome, error_line
from posttrain.tune.objectives import Measured, read_measured
from posttrain.tune.schedulers.base import Decision
from posttrain.tune.trial import UNKNOWN_MEMORY, Report


class CurvePoint(NamedTuple):
    """A step of a learning curve.

    Attributes:
        value: of the objective after it, or of each.
        seconds: Time that it takes.
        tokens: Tokens that it processes.
    """

    value: Measured
    seconds: float = 1.0
    tokens: int = 0


Curve = Callable[[Mapping[str, Any]], Iterable[CurvePoint]]
"""Returns the steps of a trial, given its settings: step 1 first."""


@dataclass
class _Run:
    """A run in progress, or a paused trial."""

    points: Iterator[CurvePoint]
    step: int = 0
    seconds: float = 0.0
    tokens: int = 0
    next: CurvePoint | Exception | None = None
    objectives: tuple[str, ...] = ()


class SimulatedBackend(Backend):
    """Replays curves.

    A trial reports each step when the clock has reached it; after the last step it returns. One that is resumed goes on
    where it was, as if its checkpoint cost nothing.

    Args:
        curve: returns the steps of a trial.
        workers: trials at a time.
    """

    is_simulated = True

    def __init__(self, curve: Curve, workers: int = 1) -> None:
        super().__init__()
        self._curve, self.workers = curve, workers
        self._now, self._order = 0.0, 0
        self._runs: dict[int, _Run] = {}
        self._queue: list[tuple[float, int, int]] = []  # when something happens, order of equal times, trial

    def start(self, job: Job) -> None:
        run = self._runs.get(job.number)
        if run is None or run.step != job.start:
            # Lazily, as a curve that fails is a failed trial. The steps of an earlier session are passed over.
            points = chain.from_iterable(map(self._curve, [job.settings]))
            run = self._runs[job.number] = _Run(islice(points, job.start, None), job.start)
        run.seconds, run.tokens, run.objectives = 0.0, 0, job.objectives
        self._schedule(job.number)

    def wait(self, handler: Handler, seconds: float | None = None) -> None:
        if seconds is not None and self._queue[0][0] > self._now + seconds:
            self._now += seconds
            return
        self._now, _, number = heapq.heappop(self._queue)
        run = self._runs[number]
        if run.next is None:
            return self._end(handler, number, "returned")
        if isinstance(run.next, Exception):
            return self._end(handler, number, "failed", error_line(run.next))
        run.step += 1
        run.seconds += run.next.seconds
        run.tokens += run.next.tokens
        try:
            first, *others = read_measured(run.next.value, run.objectives)
        except (TypeError, ValueError) as error:
            return self._end(handler, number, "failed", error_line(error))
        report = Report(run.step, first, run.seconds, run.tokens, tuple(others))
        if handler.report(number, report, UNKNOWN_MEMORY) is Decision.CONTINUE:
            return self._schedule(number)
        return self._end(handler, number, "interrupted")

    def kill(self, number: int) -> None:
        self._queue = [item for item in self._queue if item[2] != number]
        heapq.heapify(self._queue)
        self._runs.pop(number, None)

    def clock(self) -> float:
        return self._now

    def _schedule(self, number: int) -> None:
        run = self._runs[number]
        try:
            run.next = next(run.points, None)
        except Exception as error:  # noqa: BLE001  # the curve is the user's own
            run.next = error
        when = self._now + (run.next.seconds if isinstance(run.next, CurvePoint) else 0.0)
        heapq.heappush(self._queue, (when, self._order, number))
        self._order += 1

    def _end(
        self, handler: Handler, number: int, kind: Literal["returned", "interrupted", "failed"], error: str = ""
    ) -> None:
        run = self._runs[number]
        if kind != "interrupted":
            del self._runs[number]
        handler.ended(number, Outcome(kind, error=error, seconds=run.seconds, tokens=run.tokens))
