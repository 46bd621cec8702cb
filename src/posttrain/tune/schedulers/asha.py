"""Asynchronous successive halving (ASHA; Li et al. 2018, arXiv:1810.05934, Algorithm 2): no trial waits for another."""

from bisect import bisect_left, insort
from collections.abc import Mapping
from typing import Any

from posttrain.tune.schedulers.base import Decision, Promote, Scheduler, Start
from posttrain.tune.schedulers.rungs import rung_levels, warn_of_warmup


class Asha(Scheduler):
    """Promotes a trial as soon as it is among the best 1/eta of its rung, and starts a new one where none is.

    Args:
        max_resource: R, the step of the last rung, at which a trial is finished.
        min_resource: the least step of the first rung.
        eta: the factor between the steps of two rungs.

    Raises:
        UserError: the numbers leave no rungs.
    """

    def __init__(self, max_resource: int, min_resource: int = 1, eta: float = 3) -> None:
        self.max_resource = max_resource
        self._steps = rung_levels(max_resource, min_resource, eta, "scheduler asha")
        self._eta = eta
        self._rungs = [_Rung() for _ in self._steps]
        self._level: dict[int, int] = {}  # the rung that a trial runs up to
        self._arrived: set[tuple[int, int]] = set()  # trials and the rungs that they have come to

    def spare_warmup(self, share: float) -> str:
        return warn_of_warmup(self._steps, share)

    def choose(self, can_start: bool = True) -> Start | Promote | None:
        for level in range(len(self._steps) - 2, -1, -1):
            number = self._rungs[level].promotable(self._eta)
            if number is not None:
                return Promote(number, self._steps[level + 1])
        return Start(self._steps[0]) if can_start else None

    def started(self, number: int, resource: int | None, notes: Mapping[str, Any]) -> None:
        if resource not in self._steps:
            return  # of another scheduler
        self._level[number] = level = self._steps.index(resource)
        for rung in self._rungs[:level]:  # not of the last alone: it may have waited further down
            rung.remove(number)

    def report(self, number: int, step: int, value: float) -> Decision:
        if number not in self._level:
            return Decision.STOP if step >= self._steps[-1] else Decision.CONTINUE
        level = self._level[number]
        if step < self._steps[level]:
            return Decision.CONTINUE
        if (number, level) not in self._arrived:  # another scheduler may have continued it from here
            self._arrived.add((number, level))
            self._rungs[level].add(number, value)
        return Decision.PAUSE if level + 1 < len(self._steps) else Decision.STOP

    def ended(self, number: int, value: float | None) -> None:
        for rung in self._rungs:
            rung.remove(number)


class _Rung:
    """The trials that have come to a rung by value, and those of them that may be promoted."""

    def __init__(self) -> None:
        self._ranked: list[tuple[float, int]] = []
        self._waiting: list[tuple[float, int]] = []
        self._values: dict[int, float] = {}

    def add(self, number: int, value: float) -> None:
        self._values[number] = value
        insort(self._ranked, (value, number))
        insort(self._waiting, (value, number))

    def remove(self, number: int) -> None:
        """Takes a trial out of those that may be promoted; it still counts in its rung."""
        if number in self._values:
            entry = self._values[number], number
            at = bisect_left(self._waiting, entry)
            if self._waiting[at : at + 1] == [entry]:
                del self._waiting[at]

    def promotable(self, eta: float) -> int | None:
        """Returns the best trial that may be promoted, if it is among the best 1/eta of the rung."""
        # By position, not by a walk along the best: most of them have been promoted already.
        if self._waiting and bisect_left(self._ranked, self._waiting[0]) < int(len(self._ranked) // eta):
            return self._waiting[0][1]
        return None
