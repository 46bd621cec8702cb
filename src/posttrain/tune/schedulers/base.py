"""The interface of schedulers, which decide which trials run, and how far."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, ClassVar

from posttrain.tune.trial import Fork


class Decision(StrEnum):
    """The answer to a report."""

    CONTINUE = "continue"
    PAUSE = "pause"
    """The trial saves a checkpoint and makes room; it may be promoted later."""

    STOP = "stop"
    """The trial ends: it is hopeless, or has come to the end."""


@dataclass(frozen=True)
class Start:
    """A new trial that starts.

    Attributes:
        resource: the step up to which it runs; None: to its end.
        notes: JSON values to keep with the trial, which `Scheduler.started` gets.
        fork: the checkpoint of a paused trial that it continues from, and the trial that ends for it; None: it
            begins again.
    """

    resource: int | None = None
    notes: Mapping[str, Any] = field(default_factory=dict)
    fork: Fork | None = None

    @property
    def needed(self) -> tuple[int, ...]:
        """The trials whose folders are used or removed."""
        return () if self.fork is None else (self.fork.parent, self.fork.replaces)


@dataclass(frozen=True)
class Promote:
    """A paused trial that runs on.

    Attributes:
        number: the trial.
        resource: the step up to which it runs; None: to its end.
    """

    number: int
    resource: int | None = None

    @property
    def needed(self) -> tuple[int, ...]:
        """The trial whose folder is used."""
        return (self.number,)


class Scheduler(ABC):
    """Decides which trials run and how far; knows no clock, no process and no setting.

    A trial reports a value (less is better) at steps 1, 2, 3 … of its *resource*, such as epochs or evaluations. To
    write a scheduler, derive from this class and define four methods. One is a question:

    - `choose` is asked whenever a worker is free: start a new trial, promote a paused one, or neither. It changes
      nothing, so that it may be asked twice.

    Three say what has happened, and are all that changes the scheduler:

    - `started`: a trial has begun, or was promoted, as `choose` answered.
    - `report`: a running trial has reported a value. The answer is what it does next: continue, pause, or stop.
    - `ended`: a trial runs no more, and never will: it came to its own end, failed, or was stopped.

    A study that was killed is resumed by a new scheduler, to which all earlier events are replayed in their order,
    without a question. So the state must follow from the events, and ``choose`` may draw no random number. Among them
    may be trials that another scheduler started, as the user may change it; ignore these.

    With ``can_start=False`` (the budget has no trials left) `choose` returns no `Start`, and promotes what is left to
    promote: a rung that waits for trials which will never start must not hold the others up. If nothing runs
    and `choose` returns None, the study is over.

    A scheduler of a population may start a new trial from the checkpoint of a paused one (`Start.fork`), in the
    place of a trial that is paused or has failed. The parent's checkpoint is that of its last report: the parent may be
    promoted only after all trials that continue from it have been started.

    `posttrain.testing.schedulers.SchedulerContract` tests all of that, and `posttrain.tune.runs.replay` runs
    schedulers on recorded curves.

    Attributes:
        max_resource: the step at which a trial is finished; None: only the trial itself knows.
        several_objectives: whether a study of several objectives may have it; it is given the values of the first.
        sampler: name of the sampler that a study has unless the user names another.
        has_forks: whether it starts trials from checkpoints of others, which needs a `PopulationSampler`.
    """

    max_resource: int | None = None
    several_objectives: ClassVar[bool] = False
    sampler: ClassVar[str] = "auto"
    has_forks: ClassVar[bool] = False

    @abstractmethod
    def choose(self, can_start: bool = True) -> Start | Promote | None:
        """Returns what a free worker does; None: it waits."""

    @abstractmethod
    def started(self, number: int, resource: int | None, notes: Mapping[str, Any]) -> None:
        """Notes that a trial runs, up to a step; also that it was promoted.

        Args:
            number: the trial.
            resource: of the answer of `choose`.
            notes: those of its `Start`.
        """

    @abstractmethod
    def report(self, number: int, step: int, value: float) -> Decision:
        """Notes a value that a running trial has reported, and returns what the trial does next.

        Args:
            number: the trial.
            step: its resource so far; greater than in the report before, maybe by more than 1.
            value: finite; less is better.
        """

    def spare_warmup(self, share: float) -> str:
        """Receives the share of each trial that is warm-up, in which no value ends a trial.

        Called before anything else. A scheduler that compares values at fixed steps cannot move these, and may return a
        warning, in one line; by default it has nothing to do.

        Args:
            share: from 0 to 1.
        """
        return ""

    @abstractmethod
    def ended(self, number: int, value: float | None) -> None:
        """Notes that a trial has ended.

        Args:
            number: the trial.
            value: its final value, of several objectives that of the first; None if it failed.
        """
