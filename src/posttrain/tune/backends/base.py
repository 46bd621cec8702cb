"""The interface of backends, which run trials and own the time."""

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from posttrain.store.errors import UserError, WorkError
from posttrain.tune.context import TrialContext
from posttrain.tune.objectives import Measured
from posttrain.tune.schedulers.base import Decision
from posttrain.tune.trial import UNKNOWN_MEMORY, Memory, Report

TrialFunction = Callable[[TrialContext], Measured | None]
"""Runs a trial; returns its final value or values, or None if those are the last ones that it reported."""


@dataclass(frozen=True)
class Job:
    """One run of a trial.

    Attributes:
        number: the trial.
        settings: all its values.
        folder: its folder, which the backend makes.
        start: the step of its last report in an earlier run; 0 in the first.
        resource: the step up to which it is to run; None: to its end.
        seed: the trial's.
        objectives: the names of what the function measures.
    """

    number: int
    settings: Mapping[str, Any]
    folder: Path
    start: int
    resource: int | None
    seed: int
    objectives: tuple[str, ...] = ("value",)


OUT_OF_MEMORY = "out of memory"
"""Prefix of error lines that report exhausted memory, the machine's or a GPU's."""

OutcomeKind = Literal["returned", "interrupted", "failed", "out_of_memory", "infeasible", "killed"]


@dataclass(frozen=True)
class Outcome:
    """The result of a run.

    Attributes:
        kind: ``returned``; ``interrupted`` by an answer of the handler; ``failed``; ``out_of_memory``, so that it may
            be run again without others beside it; ``infeasible``, as the settings break a limit; or ``killed``, by a
            signal from outside, so that it may be run again: perhaps the kernel's, as the machine's memory ran out.
        value: what the function returned.
        error: why it failed, in a line.
        seconds: Time that the run took.
        tokens: Tokens that it processed.
        memory: the most that its process had in use.
        others: what it returned for further objectives.
    """

    kind: OutcomeKind
    value: float | None = None
    error: str = ""
    seconds: float = 0.0
    tokens: int = 0
    memory: Memory = UNKNOWN_MEMORY
    others: tuple[float, ...] = ()


class Handler(Protocol):
    """Receives the reports and outcomes of a backend, in the thread that calls `Backend.wait`."""

    def report(self, number: int, report: Report, memory: Memory) -> Decision:
        """A trial has reported what its function measured; seconds and tokens are those of the run, memory the most."""

    def show_life(self, number: int) -> Decision:
        """Returns whether a run in this process, which nothing else can end, goes on or pauses."""

    def ended(self, number: int, outcome: Outcome) -> None:
        """A run is over, and its worker is free."""


class Backend(ExitStack):
    """Runs trials; a context, which at its end ends what still runs.

    To write one, derive from this class and define the four methods. It knows nothing of schedulers: it runs the jobs
    that it is given, passes each report on and the answer back, and says how a run ended. Whatever goes wrong in a
    trial is an outcome and no exception of the backend.

    `posttrain.testing.backends.BackendContract` tests that.

    Attributes:
        workers: number of runs at a time.
        is_simulated: True if the clock is a simulated one, which stands still between calls.
    """

    workers: int = 1
    is_simulated: bool = False

    @abstractmethod
    def start(self, job: Job) -> None:
        """Begins a run; called only while fewer than ``workers`` are in progress."""

    @abstractmethod
    def wait(self, handler: Handler, seconds: float | None = None) -> None:
        """Waits until something happens to a run, and tells the handler.

        Args:
            handler: gets the report or the outcome, or several of them.
            seconds: after which to return without; a backend whose runs cannot be left may take longer, and asks
                `Handler.show_life` whenever a run shows that it gets on.
        """

    @abstractmethod
    def kill(self, number: int) -> None:
        """Ends a run at once, without an outcome; does nothing where that is not possible."""

    @abstractmethod
    def clock(self) -> float:
        """Returns the time in seconds; only differences count."""

    def available_bytes(self) -> int | None:
        """Returns the memory that all runs may have together, what they have now included; None: any."""
        return None

    def gpu_bytes(self) -> Sequence[int]:
        """Returns the memory of each GPU among which the runs are divided equally; empty: there are none, or any."""
        return ()


def error_line(error: BaseException) -> str:
    """Returns an exception as one line for a trial's record."""
    text = " ".join(str(error).split())[:300]
    name = type(error).__name__
    if isinstance(error, MemoryError) or OUT_OF_MEMORY in text.lower():
        return f"{OUT_OF_MEMORY}{f': {text}' if text else ''}"
    # Their texts are for users as they are.
    return text if isinstance(error, UserError | WorkError) else f"{name}: {text}" if text else name
