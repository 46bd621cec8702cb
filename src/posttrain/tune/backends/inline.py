"""Runs trials one after another in this process."""

import sys
import time
import traceback
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from typing import Any

from posttrain.jobs.gpus import peak_gpu_bytes, reset_gpu_peak
from posttrain.jobs.memory import peak_bytes
from posttrain.tune.backends.base import (
    OUT_OF_MEMORY,
    Backend,
    Handler,
    Job,
    Outcome,
    OutcomeKind,
    TrialFunction,
    error_line,
)
from posttrain.tune.context import Infeasible, TrialContext, TrialInterrupted
from posttrain.tune.objectives import Measured, read_measured
from posttrain.tune.schedulers.base import Decision
from posttrain.tune.trial import Memory, Report


class InlineBackend(Backend):
    """Calls the function in this process.

    Args:
        function: runs a trial.
    """

    def __init__(self, function: TrialFunction) -> None:
        super().__init__()
        self._function = function
        self._jobs: list[Job] = []

    def start(self, job: Job) -> None:
        self._jobs.append(job)

    def wait(self, handler: Handler, seconds: float | None = None) -> None:
        job = self._jobs.pop(0)

        def carry(method: Callable[..., Decision], *arguments: Any) -> Decision:
            try:
                return method(job.number, *arguments)
            except Exception as error:
                raise _HandlerError(error) from error

        try:
            outcome = run_job(self._function, job, partial(carry, handler.report), partial(carry, handler.show_life))
        except _HandlerError as wrapper:
            raise wrapper.error from None
        handler.ended(job.number, outcome)

    def kill(self, number: int) -> None:
        """Does nothing: a call cannot be ended from outside; it is when it shows life."""

    def clock(self) -> float:
        return time.monotonic()


class _HandlerError(BaseException):
    """Carries an error of the handler, such as of a full disk, through the trial's function, whose own it is not."""

    def __init__(self, error: Exception) -> None:
        self.error = error


def run_job(
    function: TrialFunction,
    job: Job,
    report: Callable[[Report, Memory], Decision],
    show_life: Callable[[], Decision] = lambda: Decision.CONTINUE,
) -> Outcome:
    """Runs a trial in this process.

    Args:
        function: runs it.
        job: the run.
        report: called with a report, whose costs are those of the run, and the most memory in use; returns what to do
            next.
        show_life: called where the trial says that it gets on; returns what to do next.
    """
    began, spent = time.monotonic(), 0
    reset_gpu_peak()

    def pass_on(step: int, value: Measured, tokens: int) -> Decision:
        nonlocal spent
        first, *others = read_measured(value, job.objectives)
        spent += tokens
        return report(Report(step, first, time.monotonic() - began, spent, tuple(others)), peak_memory())

    def outcome(
        kind: OutcomeKind, value: float | None = None, others: Iterable[float] = (), error: str = ""
    ) -> Outcome:
        return Outcome(kind, value, error, time.monotonic() - began, spent, peak_memory(), tuple(others))

    try:
        job.folder.mkdir(parents=True, exist_ok=True)
        run = (job.number, job.settings, job.folder, job.start, job.resource, job.seed)
        value = function(TrialContext(*run, pass_on, show_life))
        if value is None:
            return outcome("returned")
        first, *others = read_measured(value, job.objectives)
        return outcome("returned", first, others)
    except TrialInterrupted:
        return outcome("interrupted")
    except Infeasible as error:
        return outcome("infeasible", error=str(error))
    # Whatever the function raises is recorded with its trial.
    except Exception as error:  # noqa: BLE001
        line = error_line(error)
        _write_traceback(job)
        return outcome("out_of_memory" if line.startswith(OUT_OF_MEMORY) else "failed", error=line)


def _write_traceback(job: Job) -> None:
    """Writes where the function failed into ``errors/NUMBER.txt``, beside the folders of the trials."""
    file = job.folder.parent / "errors" / f"{job.folder.name}.txt"
    # A disk that is full must not hide the error itself.
    with suppress(OSError):
        file.parent.mkdir(exist_ok=True)
        file.write_text(traceback.format_exc(), encoding="utf-8")


def peak_memory() -> Memory:
    """Returns the most that this process had in use since its trial began; inline of the machine since its start."""
    return Memory(_peak_resident(), peak_gpu_bytes())


def _peak_resident() -> int:
    """Returns the most bytes of resident memory; 0 if unknown."""
    if peak := peak_bytes():
        return peak
    try:
        import resource
    except ImportError:  # Windows
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
