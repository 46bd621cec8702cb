"""The objectives of a study: which values a trial has, which of them it is measured by, and which trial of a front to
take."""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from pydantic import Field

from posttrain.jobs.memory import Memory
from posttrain.store.errors import UserError
from posttrain.store.section import Section
from posttrain.tune.pareto import front_mask, is_dominated, knee
from posttrain.tune.trial import Trial, TrialState

COSTS = ("seconds", "tokens", "memory_bytes", "gpu_memory_bytes")
"""Objectives that the study measures itself: what a trial has spent so far, over all its runs."""

KNEE = "knee"

_WITHIN = re.compile(r"(\S.*?)\s+within\s+(\d+(?:\.\d+)?)\s*%")

Measured = float | Sequence[float] | Mapping[str, float]
"""Values as a function gives them: one, several in the order of its objectives, or by name."""


@dataclass(frozen=True)
class Objective:
    """Something to search the least, or the greatest, value of.

    Attributes:
        name: of a value that the function gives, or one of `COSTS`.
        maximize: whether greater values are better.
        limit: a trial that is worse is not chosen while another is not; None: none is too bad.
    """

    name: str
    maximize: bool = False
    limit: float | None = None

    def to_json(self) -> dict[str, Any]:
        """Returns the objective as JSON values."""
        return {"metric": self.name, "maximize": self.maximize, "limit": self.limit}

    @property
    def text(self) -> str:
        """The direction and the name, such as ``least loss``."""
        return f"{'greatest' if self.maximize else 'least'} {self.name}"


@dataclass(frozen=True)
class Objectives:
    """One objective or several, and the rule that chooses a trial of their front.

    Attributes:
        items: the objectives.
        choose: ``knee``, or such as ``loss within 1%``.
    """

    items: tuple[Objective, ...]
    choose: str = KNEE

    def __len__(self) -> int:
        return len(self.items)

    def to_json(self) -> dict[str, Any]:
        """Returns the arguments of `read_objectives` as JSON values."""
        return {"objectives": [item.to_json() for item in self.items], "choose": self.choose}

    @property
    def names(self) -> tuple[str, ...]:
        """The names, in their order."""
        return tuple(item.name for item in self.items)

    @property
    def directions(self) -> tuple[bool, ...]:
        """For each objective, True if greater values are better."""
        return tuple(item.maximize for item in self.items)

    @property
    def measured(self) -> tuple[str, ...]:
        """The names of those that the function gives, in their order."""
        return tuple(name for name in self.names if not self._is_cost(name))

    def select_measured(self, values: Sequence[float]) -> tuple[float, ...]:
        """Returns those of all values that the function gave."""
        return tuple(value for name, value in zip(self.names, values, strict=True) if not self._is_cost(name))

    def complete(self, measured: Sequence[float], seconds: float, tokens: int, memory: Memory) -> tuple[float, ...]:
        """Returns the values of all objectives, given those that the function gave and what the trial has spent."""
        rest, spent = iter(measured), dict(zip(COSTS, (seconds, tokens, *memory), strict=True))
        return tuple(float(spent[name]) if self._is_cost(name) else next(rest) for name in self.names)

    def losses(self, values: Sequence[float]) -> tuple[float, ...]:
        """Returns values with the signs that make less better."""
        return tuple(-value if item.maximize else value for item, value in zip(self.items, values, strict=True))

    def first_non_finite(self, values: Sequence[float]) -> tuple[str, float] | None:
        """Returns the first value that is NaN or infinite, and its text, such as ``value of loss``; None if none is."""
        for name, value in zip(self.names, values, strict=True):
            if not math.isfinite(value):
                return f"value of {name}" if len(self) > 1 else "value", value
        return None

    def points(self, trials: Sequence[Trial]) -> np.ndarray:
        """Returns the losses of finished trials, float64 [trials, objectives]."""
        rows = [self.losses(trial.values) for trial in trials if trial.values is not None]
        return np.array(rows, dtype=np.float64).reshape(len(rows), len(self))

    def front(self, trials: Sequence[Trial]) -> list[Trial]:
        """Returns the finished trials that no finished one dominates, by number; with one objective, the best ones."""
        finished = [trial for trial in trials if _is_finished(trial)]
        mask = front_mask(self.points(finished))
        return [trial for trial, kept in zip(finished, mask.tolist(), strict=True) if kept]

    def extend_front(self, front: Sequence[Trial], trial: Trial) -> list[Trial]:
        """Returns the front of a front and a trial that has just ended, by number."""
        if not _is_finished(trial) or is_dominated(self.points(front), self.points([trial])[0]):
            return list(front)
        members = {member.number: member for member in (*front, trial)}
        return self.front([members[number] for number in sorted(members)])

    def meets_limits(self, trial: Trial) -> bool:
        """Returns whether a finished trial is no worse than any limit."""
        values = zip(self.items, trial.values or (), strict=True)
        return all(
            item.limit is None or (value >= item.limit if item.maximize else value <= item.limit)
            for item, value in values
        )

    def choose_trial(self, front: Sequence[Trial]) -> Trial | None:
        """Returns the trial of a front that the rule chooses among those that meet the limits; None of an empty one.

        Where none meets them all count. A trial outside of the front cannot meet them if none of the front does.
        """
        candidates = [trial for trial in front if self.meets_limits(trial)] or list(front)
        if not candidates:
            return None
        points = self.points(candidates)
        rule = _WITHIN.fullmatch(self.choose)
        if rule is None:
            return candidates[knee(points)]
        column = self.names.index(rule[1])
        best = float(points[:, column].min())
        enough = points[:, column] <= best + float(rule[2]) / 100 * abs(best)
        others = np.delete(points, column, axis=1)
        chosen = min(np.flatnonzero(enough).tolist(), key=lambda row: (*others[row].tolist(), row))
        return candidates[chosen]

    def describe(self, values: Sequence[float]) -> str:
        """Formats values with their names, such as ``loss 0.4123, seconds 12.5``."""
        return ", ".join(f"{name} {value:.6g}" for name, value in zip(self.names, values, strict=True))

    def _is_cost(self, name: str) -> bool:
        # A study of one objective has nothing but what its function gives.
        return len(self) > 1 and name in COSTS


def read_objectives(
    values: Sequence[Any],
    choose: str = KNEE,
    where: str = "objectives",
    maximize: Callable[[str], bool] | None = None,
    costs: Sequence[str] = COSTS,
) -> Objectives:
    """Reads a list of objectives.

    Args:
        values: `Objective`, names, or mappings with ``metric``, ``maximize`` and ``limit``.
        choose: the rule that chooses a trial of the front.
        where: the key, named in errors.
        maximize: returns whether greater values of a name are better where its entry does not say; False by default.
        costs: names of objectives that are least if nothing is done.

    Raises:
        UserError: an entry is not an objective, one is there twice, all are costs, or the rule is unknown.
    """
    items = tuple(_read(value, where, maximize or (lambda name: False), costs) for value in values)
    names = [item.name for item in items]
    if repeated := [name for name in names if names.count(name) > 1]:
        raise UserError(f"`{repeated[0]}` is there twice", where=where, fix="name each objective once")
    if not items or all(name in costs for name in names):
        what = f"only {', '.join(names)}: what a trial costs is least if it does nothing" if items else "are empty"
        raise UserError(what, where=where, fix="add what the trial must be good at")
    rule = _WITHIN.fullmatch(choose)
    if choose != KNEE and (rule is None or rule[1] not in names):
        fix = f"give {KNEE}, or such as {names[0]} within 1%"
        raise UserError(f"`{choose}` chooses no trial of a front", where=where.replace("objectives", "choose"), fix=fix)
    return Objectives(items, choose)


class _Entry(Section):
    """An objective as a config has it."""

    metric: str = Field(min_length=1)
    maximize: bool | None = None
    limit: float | None = None


def _read(value: Any, where: str, maximize: Callable[[str], bool], costs: Sequence[str]) -> Objective:
    mapping = value.to_json() if isinstance(value, Objective) else {"metric": value}
    entry = _Entry.read(value if isinstance(value, Mapping) else mapping, where)
    if entry.metric in costs and entry.maximize:
        what = f"`{entry.metric}` is what a trial costs, and cannot be maximised"
        raise UserError(what, where=where, fix="leave it out")
    greater = maximize(entry.metric) if entry.maximize is None else entry.maximize
    return Objective(entry.metric, greater, entry.limit)


def read_measured(value: Measured, names: Sequence[str]) -> tuple[float, ...]:
    """Returns the values that a function gave, in the order of its objectives.

    Args:
        value: one, several in their order, or by name; others than those that are asked for count nothing.
        names: of the objectives.

    Raises:
        ValueError: one is missing, or there are others.
        TypeError: one is not a number.
    """
    if isinstance(value, Mapping):
        if missing := [name for name in names if name not in value]:
            raise ValueError(
                f"the objective {missing[0]} is missing: there is {', '.join(map(str, value)) or 'nothing'}"
            )
        return tuple(float(value[name]) for name in names)
    if len(names) == 1 and not isinstance(value, list | tuple):
        return (float(value),)  # type: ignore[arg-type]
    if not isinstance(value, Sequence | np.ndarray) or isinstance(value, str):
        raise ValueError(f"one value for the {len(names)} objectives {', '.join(names)}")
    if len(value) != len(names):
        raise ValueError(f"{len(value)} values for the objectives {', '.join(names)}")
    return tuple(float(item) for item in value)


def _is_finished(trial: Trial) -> bool:
    return trial.state is TrialState.FINISHED and trial.value is not None
