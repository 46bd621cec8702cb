"""A trial of a study: its settings, what it reported and spent, and how it ended."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from typing import Any, NamedTuple


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
        seconds: Time that the trial has taken so far, over all its runs.
        tokens: Tokens that it has processed so far, over all its runs.
        others: the values of further objectives.
    """

    step: int
    value: float
    seconds: float = 0.0
    tokens: int = 0
    others: tuple[float, ...] = ()

    @property
    def values(self) -> tuple[float, ...]:
        """The values of all objectives."""
        return (self.value, *self.others)


@dataclass(frozen=True)
class Fork:
    """The checkpoint that a trial continues from, in place of beginning again.

    Attributes:
        parent: the trial whose checkpoint it is.
        step: the parent's step then.
        replaces: the trial whose place in its population it takes, which ends.
    """

    parent: int
    step: int
    replaces: int


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
        memory_bytes, gpu_memory_bytes: the most that its process had in use, of the machine and of a GPU; 0 where that
            is not known.
        notes: what the sampler and the scheduler keep with it, JSON values by name.
        fork: the checkpoint that it continued from; None: it began without one.
        others: the final values of further objectives; empty without a value.
        lost: whether it failed for a reason that is not in its settings: its process was killed, or a checkpoint is
            gone.
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
    gpu_memory_bytes: int = 0
    notes: Mapping[str, Any] = field(default_factory=dict)
    fork: Fork | None = None
    others: tuple[float, ...] = ()
    lost: bool = False

    @property
    def step(self) -> int:
        """The step of the last report; without one that of the fork, or 0."""
        if self.reports:
            return self.reports[-1].step
        return self.fork.step if self.fork else 0

    @property
    def latest(self) -> float | None:
        """The final value, or that of the last report; None without either, and of a failed trial."""
        if self.state is TrialState.FAILED:
            return None
        return self.value if self.value is not None else self.reports[-1].value if self.reports else None

    @property
    def values(self) -> tuple[float, ...] | None:
        """The final values of all objectives; None without."""
        return None if self.value is None else (self.value, *self.others)

    @property
    def latest_values(self) -> tuple[float, ...] | None:
        """The values of all objectives, as `latest` has the first."""
        if self.latest is None:
            return None
        return self.values or self.reports[-1].values

    @property
    def ended(self) -> bool:
        """True if the trial cannot be resumed."""
        return self.state not in (TrialState.RUNNING, TrialState.PAUSED)

    @property
    def has_bad_settings(self) -> bool:
        """True if its settings made it fail: a NaN, an exception, its memory, a limit. Samplers learn from it."""
        return self.state is TrialState.FAILED and not self.lost

    def to_json(self) -> dict[str, Any]:
        """Returns the trial as a line of ``trials.jsonl`` has it.

        With several objectives ``value`` is that of the first, ``values`` has all; each report ends with the others.
        """
        latest = self.latest_values
        several = {} if latest is None or len(latest) < 2 else {"values": self.values and list(self.values)}
        return {
            "number": self.number,
            "state": str(self.state),
            "value": self.value,
            **several,
            "settings": dict(self.settings),
            "reports": [
                [report.step, report.value, report.seconds, report.tokens, *report.others] for report in self.reports
            ],
            "seconds": self.seconds,
            "tokens": self.tokens,
            "memory_bytes": self.memory_bytes,
            "gpu_memory_bytes": self.gpu_memory_bytes,
            "error": self.error,
            **({"fork": asdict(self.fork)} if self.fork else {}),
        }


class Span(NamedTuple):
    """Steps of a lineage that one trial ran.

    Attributes:
        trial: the trial, with the settings of these steps.
        start: the step that it continued from; 0: it began without one.
        end: its last step that counts.
    """

    trial: Trial
    start: int
    end: int


def lineage(trials: Sequence[Trial], number: int) -> list[Span]:
    """Returns how a trial came to its last step, the first steps first: one span unless it went on from another's."""
    trial, end = trials[number], trials[number].step
    spans: list[Span] = []
    while (fork := trial.fork) is not None:
        spans.append(Span(trial, fork.step, end))
        trial, end = trials[fork.parent], fork.step
    return [Span(trial, 0, end), *reversed(spans)]


def schedule_to_json(spans: Sequence[Span]) -> list[dict[str, Any]]:
    """Returns the settings of a lineage by step, as JSON values."""
    return [
        {"steps": [span.start + 1, span.end], "trial": span.trial.number, "settings": dict(span.trial.settings)}
        for span in spans
    ]


def with_objective(trial: Trial, index: int) -> Trial:
    """Returns a trial as a study of one of its objectives would have it."""
    reports = tuple(replace(report, value=report.values[index], others=()) for report in trial.reports)
    value = None if trial.values is None else trial.values[index]
    return replace(trial, value=value, others=(), reports=reports)


def best_trial(trials: Sequence[Trial], *, maximize: bool = False) -> Trial | None:
    """Returns the first of the trials that have a value, in the order of `rank`; None without any value."""
    valued = (trial for trial in trials if trial.latest is not None)
    return min(valued, key=lambda trial: rank(trial, maximize), default=None)


def rank(trial: Trial, maximize: bool) -> tuple[bool, bool, int, float, int]:
    """Returns what trials are sorted by, the best first.

    Those that have finished come first, by their values. Others follow by their last step and then their value there,
    as values at different steps of a training cannot be compared. Those without a value come last.
    """
    finished = trial.state is TrialState.FINISHED
    value = math.inf if trial.latest is None else -trial.latest if maximize else trial.latest
    return trial.latest is None, not finished, 0 if finished else -trial.step, value, trial.number
