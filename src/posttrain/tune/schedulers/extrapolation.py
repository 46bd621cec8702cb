"""Stops trials that will hardly beat the best one, by their extrapolated learning curves."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from posttrain.store.errors import UserError
from posttrain.tune.curves import Forecast, extrapolate
from posttrain.tune.schedulers.base import Decision
from posttrain.tune.schedulers.none import RunToEnd
from posttrain.tune.schedulers.rungs import check_resources


class Extrapolation(RunToEnd):
    """Stops a trial when its chance to end below the best last value so far is small (Domhan et al. 2015).

    The first trials run to the end: they say where last values lie, and how far apart (`posttrain.tune.curves`). The
    curves of finished trials are extrapolated from the same step, too. By as much as their last values miss what was
    predicted, in deviations, each forecast is widened: no family of curves fits every schedule of learning rates.

    Args:
        max_resource: the step at which a trial is finished.
        chance: the least probability with which a trial goes on.
        min_resource: the step before which none is stopped.
        startup: trials that must have finished before.

    Raises:
        UserError: an option is out of its range.
    """

    several_objectives: ClassVar[bool] = False

    def __init__(self, max_resource: int, chance: float = 0.05, min_resource: int = 3, startup: int = 5) -> None:
        super().__init__(max_resource)
        where = "scheduler extrapolation"
        if not 0 < chance < 1:
            raise UserError(f"chance {chance:g} is no probability between 0 and 1", where=where)
        check_resources(max_resource, min_resource, where)
        if startup < 2:
            raise UserError(f"startup {startup} is less than 2", where=where, fix="the scale follows from two values")
        self._last, self._chance, self._least, self._startup = max_resource, chance, min_resource, startup
        self._curves: dict[int, tuple[list[int], list[float]]] = {}  # steps and values of trials that have not ended
        self._ends: list[float] = []  # last values
        self._finished: list[tuple[list[int], list[float]]] = []
        self._misses: dict[int, list[float]] = {}  # of finished trials, squared deviations, by step

    def spare_warmup(self, share: float) -> str:
        self._least = max(self._least, math.floor(round(share * self._last, 6)) + 1)
        return ""

    def started(self, number: int, resource: int | None, notes: Mapping[str, Any]) -> None:
        if resource == self._last:  # else it is of another scheduler
            self._curves.setdefault(number, ([], []))

    def report(self, number: int, step: int, value: float) -> Decision:
        decision = super().report(number, step, value)
        if number not in self._curves:
            return decision
        steps, values = self._curves[number]
        steps.append(step)
        values.append(value)
        if decision is Decision.CONTINUE and step >= self._least and self._is_hopeless(steps, values):
            del self._curves[number]  # so that its value does not count as a last one
            return Decision.STOP
        return decision

    def ended(self, number: int, value: float | None) -> None:
        curve = self._curves.pop(number, None)
        if curve is not None and value is not None:
            self._ends.append(value)
            if curve[0]:  # else another scheduler has trained it
                self._finished.append(curve)

    def forecast(self, steps: Sequence[int], values: Sequence[float]) -> Forecast | None:
        """Returns the distribution of the last value of a trial with these values; None before enough have finished."""
        if len(self._ends) < self._startup:
            return None
        # By quartiles: a few trainings that have diverged say nothing of the others.
        low, centre, high = np.quantile(self._ends, [0.25, 0.5, 0.75])
        scale = max((high - low) / 1.349, 1e-9 * max(1.0, abs(centre)))

        def extrapolated(steps: Sequence[int], values: Sequence[float]) -> Forecast:
            return extrapolate(steps, values, self._last, float(centre), float(scale))

        misses = self._misses.setdefault(len(steps), [])
        for other_steps, other_values in self._finished[len(misses) :]:
            earlier = extrapolated(other_steps[: len(steps)], other_values[: len(steps)])
            misses.append(((other_values[-1] - earlier.mean) / earlier.deviation) ** 2)
        wider = max(1.0, float(np.mean(misses)) ** 0.5) if misses else 1.0
        return extrapolated(steps, values).widened(wider)

    def _is_hopeless(self, steps: list[int], values: list[float]) -> bool:
        forecast = self.forecast(steps, values)
        return forecast is not None and forecast.probability_below(min(self._ends)) < self._chance
