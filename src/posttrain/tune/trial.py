"""A trial of a study: its settings, what it reported and spent, and how it ended."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class TrialState(StrEnum):
    """The state of a trial."""

    RUNNING = "running"
    PAUSED = "paused"
    """May be resumed from its checkpoints."""

    FINISHED = "finished"
    """Ran to its end, and has a value."""

    STOPPED = "stopped"
    """Ended early by the scheduler."""

    FAILED = "failed"


@dataclass(frozen=True)
class Report:
    """An intermediate value.

    Attributes:
        step: its resource, such as the number of epochs or of evaluations so far; from 1.
        value: the value of the objective.
        seconds: that the trial has taken so far, over all its runs.
        tokens: that the trial has processed so far, over all its runs.
    """

    step: int
    value: float
    seconds: float = 0.0
    tokens: int = 0


@dataclass(frozen=True)
class Trial:
    """One point of the space, and what came of it.

    Attributes:
        number: from 0, in the order of their starts.
        settings: all values, by name.
        drawn: those of them that were drawn.
        state: its state.
        reports: its intermediate values, by step.
        value: its final value; None if it has none.
        error: why it failed, in a line; empty unless it did.
        resource: the step up to which the scheduler last had it run; None: to its end.
        seconds, tokens: what it has spent, over all its runs.
        memory_bytes: the most that its process had in use; 0 where that is not known.
        notes: what the sampler and the scheduler keep with it, JSON values by name.
    """

    number: int
    settings: Mapping[str, Any]
    drawn: Mapping[str, Any]
    state: TrialState = TrialState.RUNNING
    reports: tuple[Report, ...] = ()
    value: float | None = None
    error: str = ""
    resource: int | None = None
    seconds: float = 0.0
    tokens: int = 0
    memory_bytes: int = 0
    notes: Mapping[str, Any] = field(default_factory=dict)

    @property
    def step(self) -> int:
        """The step of the last report; 0 without one."""
        return self.reports[-1].step if self.reports else 0

    @property
    def latest(self) -> float | None:
        """The final value, or that of the last report; None without either, and of a failed trial."""
        if self.state is TrialState.FAILED:
            return None
        return self.value if self.value is not None else self.reports[-1].value if self.reports else None

    @property
    def ended(self) -> bool:
        """Whether it cannot be resumed."""
        return self.state in (TrialState.FINISHED, TrialState.STOPPED, TrialState.FAILED)

    def to_json(self) -> dict[str, Any]:
        """Returns the trial as a line of ``trials.jsonl`` has it."""
        return {
            "number": self.number,
            "state": str(self.state),
            "value": self.value,
            "settings": dict(self.settings),
            "reports": [[report.step, report.value, report.seconds, report.tokens] for report in self.reports],
            "seconds": self.seconds,
            "tokens": self.tokens,
            "memory_bytes": self.memory_bytes,
            "error": self.error,
        }


def best_trial(trials: Sequence[Trial], *, maximize: bool = False) -> Trial | None:
    """Returns the finished trial with the best value, the first of equal ones.

    If none has finished, those that came furthest are compared by their last reports: values at different steps of a
    training cannot be compared. None without any value.
    """
    finished = [trial for trial in trials if trial.state is TrialState.FINISHED]
    if not finished:
        furthest = max((trial.step for trial in trials if trial.latest is not None), default=0)
        finished = [trial for trial in trials if trial.latest is not None and trial.step == furthest]
    return min(finished, key=lambda trial: _rank(trial, maximize), default=None)


def rank_trials(trials: Sequence[Trial], *, maximize: bool = False) -> list[Trial]:
    """Returns the trials, the best first: those that have finished, then those that came further, failed ones last."""
    return sorted(
        trials,
        key=lambda trial: (
            trial.state is TrialState.FAILED,
            trial.state is not TrialState.FINISHED,
            0 if trial.state is TrialState.FINISHED else -trial.step,
            _rank(trial, maximize),
        ),
    )


def _rank(trial: Trial, maximize: bool) -> tuple[float, int]:
    value = math.inf if trial.latest is None else trial.latest
    return (-value if maximize and value != math.inf else value), trial.number
