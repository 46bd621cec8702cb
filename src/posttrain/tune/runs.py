"""Runs of trials as tasks of a runner: what is sent to it, what comes back, and learning curves in place of trials."""

import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal, NamedTuple

from posttrain.jobs.gpus import has_gpu
from posttrain.jobs.runner import SILENCE, Runner, open_runner
from posttrain.jobs.simulated import Play, SimulatedRunner
from posttrain.jobs.task import Task, TaskContext
from posttrain.store.errors import UserError
from posttrain.tune.context import Infeasible, TrialContext, TrialInterrupted
from posttrain.tune.objectives import Measured, Objectives, read_measured
from posttrain.tune.schedulers.base import Decision
from posttrain.tune.trial import Report

TrialFunction = Callable[[TrialContext], Measured | None]
"""Runs a trial; returns its final value or values, or None if those are the last ones that it reported."""


class TrialRun(NamedTuple):
    """The argument of a run's task.

    Attributes:
        settings: all values of the trial.
        start: the step of its last report in an earlier run; 0 in the first.
        resource: the step up to which it runs; None: to its end.
        seed: the trial's.
        objectives: the names of what the function measures.
    """

    settings: Mapping[str, Any]
    start: int
    resource: int | None
    seed: int
    objectives: tuple[str, ...] = ("value",)


class TrialEnd(NamedTuple):
    """The value of a run's task.

    Attributes:
        kind: ``returned``; ``interrupted`` by an answer; or ``infeasible``, as the settings break a limit.
        values: what the function returned; empty if it did not return any.
        error: which limit.
    """

    kind: Literal["returned", "interrupted", "infeasible"]
    values: tuple[float, ...] = ()
    error: str = ""


@dataclass(frozen=True)
class RunTrial:
    """The function of a study's runner: its messages are reports, and their answers decisions.

    Args:
        function: runs a trial.
    """

    function: TrialFunction

    def __call__(self, context: TaskContext) -> TrialEnd:
        run: TrialRun = context.argument
        began, spent = time.monotonic(), 0

        def report(step: int, value: Measured, tokens: int) -> Decision:
            nonlocal spent
            first, *others = read_measured(value, run.objectives)
            spent += tokens
            answer: Decision = context.send(Report(step, first, time.monotonic() - began, spent, tuple(others)))
            return answer

        arguments = (context.number, run.settings, context.folder, run.start, run.resource, run.seed)
        try:
            value = self.function(TrialContext(*arguments, report, context.show_life))
            return TrialEnd("returned", () if value is None else read_measured(value, run.objectives))
        except TrialInterrupted:
            return TrialEnd("interrupted")
        except Infeasible as error:
            return TrialEnd("infeasible", error=str(error))


def open_trials(engine: str, function: TrialFunction, workers: int | None = None, silence: float = SILENCE) -> Runner:
    """Opens the runner of a study, as `open_runner` does."""
    return open_runner(engine, RunTrial(function), workers, silence)


class CurvePoint(NamedTuple):
    """A step of a learning curve.

    Attributes:
        value: of the objective after it, or of each.
        seconds: Time that it takes.
        tokens: Tokens that it processes.
    """

    value: Measured
    seconds: float = 1.0
    tokens: int = 0


Curve = Callable[[Mapping[str, Any]], Iterable[CurvePoint]]
"""Returns the steps of a trial, given its settings: step 1 first."""


def replay(curve: Curve, workers: int = 1) -> SimulatedRunner:
    """Returns a runner that replays learning curves.

    A trial reports each step when the clock has reached it; after the last step it returns. One that is resumed
    continues where it was, as if its checkpoint cost nothing.

    Args:
        curve: returns the steps of a trial.
        workers: trials at a time.
    """

    def play(task: Task) -> Play:
        run: TrialRun = task.argument
        seconds, tokens = 0.0, 0
        for step, point in enumerate(islice(curve(run.settings), run.start, None), run.start + 1):
            seconds, tokens = seconds + point.seconds, tokens + point.tokens
            first, *others = read_measured(point.value, run.objectives)
            answer = yield point.seconds, Report(step, first, seconds, tokens, tuple(others))
            if answer is not Decision.CONTINUE:
                return TrialEnd("interrupted")
        return TrialEnd("returned")

    return SimulatedRunner(play, workers)


def check_memory(names: Collection[str], engine: str, where: str) -> None:
    """Raises a `UserError` if the engine does not measure the memory of a trial that is asked for.

    Args:
        names: what is asked for, such as ``memory_bytes`` or ``gpu_memory_bytes``; other names do not matter.
        engine: runs the trials.
        where: the key, named in errors.
    """
    if "memory_bytes" in names and engine == "inline":
        what = "`memory_bytes` of a trial is not known where all trials run in one process"
        raise UserError(what, where=where, fix="use --engine processes")
    if "gpu_memory_bytes" in names and engine in ("inline", "processes") and not has_gpu():
        what = "`gpu_memory_bytes` of a trial is not known where there is no GPU"
        raise UserError(what, where=where, fix="use memory_bytes")


def check_objectives(objectives: Objectives, engine: str, *, starts_warm: bool, section: str = "") -> None:
    """Raises a `UserError` if the engine does not measure an objective, or if there are several where one is asked for.

    Args:
        objectives: what is searched.
        engine: runs the trials.
        starts_warm: whether it starts from earlier studies.
        section: of a config, before the names of keys in errors, such as ``tune.``.
    """
    check_memory(objectives.names, engine, f"{section}objectives")
    count = len(objectives)
    if count > 1 and starts_warm:
        what = f"carries over the best settings by one objective, and there are {count}"
        raise UserError(what, where=f"{section}warm_start", fix="leave it out, or name settings in initial")
