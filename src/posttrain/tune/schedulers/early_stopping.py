"""Stops trials that have ceased to improve, with more patience early than late."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from pydantic import Field

from posttrain.tune.schedulers.base import Decision
from posttrain.tune.schedulers.none import RunToEnd

_IMPROVEMENT = 0.01  # the least relative improvement that counts

_WARMUP = 0.2  # the share of a trial in which none is stopped, at least


@dataclass
class _Progress:
    """A trial's least value that counts as an improvement, the step of it, and its least value of all."""

    reference: float = math.inf
    step: int = 0
    least: float = math.inf


class EarlyStopping(RunToEnd):
    """Stops a trial whose value has not improved, relative to its best, for a number of steps.

    The patience is doubled in the first third of a trial and halved in the last: stopping too early loses the winner,
    stopping too late only time. No trial is stopped before its warm-up is over, nor one that is the best of all at its
    step, as nothing would be left to finish.

    Args:
        max_resource: the step at which a trial is finished.
        patience: steps without an improvement.

    Raises:
        UserError: an option is out of its range.
    """

    several_objectives: ClassVar[bool] = False

    def __init__(self, max_resource: int, patience: Annotated[int, Field(ge=1)] = 3) -> None:
        super().__init__(max_resource)
        self._last, self._patience, self._warmup = max_resource, patience, _WARMUP
        self._progress: dict[int, _Progress] = {}
        self._leaders: dict[int, tuple[float, int]] = {}  # the least value up to a step and its first trial, by step

    def patience(self, step: int) -> float:
        """Returns the steps without an improvement after which a trial is stopped."""
        if 3 * step <= self._last:
            return 2 * self._patience
        return self._patience if 3 * step <= 2 * self._last else max(1.0, self._patience / 2)

    def spare_warmup(self, share: float) -> str:
        self._warmup = max(self._warmup, share)
        return ""

    def started(self, number: int, resource: int | None, notes: Mapping[str, Any]) -> None:
        if resource == self._last:  # else it is of another scheduler
            self._progress.setdefault(number, _Progress())

    def report(self, number: int, step: int, value: float) -> Decision:
        decision = super().report(number, step, value)
        if number not in self._progress:
            return decision
        progress = self._progress[number]
        progress.least = min(progress.least, value)
        self._leaders[step] = min((progress.least, number), self._leaders.get(step, (math.inf, 0)))
        if value < progress.reference - _IMPROVEMENT * abs(progress.reference) or progress.step == 0:
            progress.reference, progress.step = value, step
        leads = self._leaders[step][1] == number
        if decision is Decision.STOP or leads or step <= self._warmup * self._last:
            return decision
        return Decision.STOP if step - progress.step >= self.patience(step) else Decision.CONTINUE

    def ended(self, number: int, value: float | None) -> None:
        self._progress.pop(number, None)
