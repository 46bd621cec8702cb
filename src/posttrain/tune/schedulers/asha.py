"""Asynchronous successive halving (ASHA; Li et al. 2018, arXiv:1810.05934, Algorithm 2): no trial waits for another."""

from bisect import insort
from collections.abc import Mapping
from itertools import islice
from typing import Any

from posttrain.tune.schedulers.base import Decision, Promote, Scheduler, Start
from posttrain.tune.schedulers.rungs import rung_levels


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
        self._rungs: list[list[tuple[float, int]]] = [[] for _ in self._steps]  # ascending values, with their trials
        self._promoted: list[set[int]] = [set() for _ in self._steps]
        self._level: dict[int, int] = {}  # the rung that a trial runs up to
        self._over: set[int] = set()

    def choose(self, can_start: bool = True) -> Start | Promote | None:
        for level in range(len(self._steps) - 2, -1, -1):
            rung = self._rungs[level]
            for _, number in islice(rung, int(len(rung) // self._eta)):
                if number not in self._promoted[level] and number not in self._over:
                    return Promote(number, self._steps[level + 1])
        return Start(self._steps[0]) if can_start else None

    def started(self, number: int, resource: int | None, notes: Mapping[str, Any]) -> None:
        if resource not in self._steps:
            return  # of another scheduler
        self._level[number] = level = self._steps.index(resource)
        if level:
            self._promoted[level - 1].add(number)

    def report(self, number: int, step: int, value: float) -> Decision:
        if number not in self._level:
            return Decision.STOP if step >= self._steps[-1] else Decision.CONTINUE
        level = self._level[number]
        if step < self._steps[level]:
            return Decision.CONTINUE
        insort(self._rungs[level], (value, number))
        return Decision.PAUSE if level + 1 < len(self._steps) else Decision.STOP

    def ended(self, number: int, value: float | None) -> None:
        self._over.add(number)
