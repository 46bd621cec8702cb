"""Measures how long a scheduler takes for a decision when a study has many trials, beside Optuna's pruners.

    python benchmarks/scheduler_overhead.py [--trials 10000] [--rows NAME ...]

Ours: each call of ``choose``, ``started``, ``report`` and ``ended`` of a study on made-up curves. Optuna's: a report
and ``should_prune`` of a trial in a study in memory; its pruners look at all trials. A row of the driver has all that a
study does between two reports of its trials: the decision, what to run next, the sampler's settings of a trial that
starts, and what is written, in memory or into ``study.db``. Times are of the thread's own
processor time, in milliseconds, so that other programs do not count. ``last`` is the median over the last tenth of the
trials, when the study is largest. Python's garbage collector is off: what it walks is this script's own record.
"""

import argparse
import gc
import tempfile
import time
from collections.abc import Callable
from statistics import median
from types import SimpleNamespace
from typing import Any

import optuna

from posttrain.jobs.simulated import Play, SimulatedRunner
from posttrain.jobs.task import Handler, Task
from posttrain.testing.schedulers import SchedulerRun
from posttrain.tune.api import optimize
from posttrain.tune.goal import Goal
from posttrain.tune.runs import TrialEnd
from posttrain.tune.schedulers.base import Decision, Scheduler
from posttrain.tune.schedulers.registry import make_scheduler
from posttrain.tune.space import Space
from posttrain.tune.trial import Report

STEPS = 81

METHODS = ("choose", "started", "report", "ended")


def value(number: int, step: int) -> float:
    """Returns the value of a trial at a step: a curve that falls to an end of its own."""
    return number * 7919 % 10007 / 10007 + 1 / step


def timed(function: Callable[..., Any], times: list[float]) -> Callable[..., Any]:
    """Returns the function with its time in milliseconds appended to ``times``."""

    def call(*arguments: Any) -> Any:
        start = time.thread_time()
        result = function(*arguments)
        times.append(1000 * (time.thread_time() - start))
        return result

    return call


def measure(scheduler: Scheduler, trials: int) -> list[float]:
    """Returns the milliseconds of each decision of a whole study."""
    times: list[float] = []
    for name in METHODS:
        setattr(scheduler, name, timed(getattr(scheduler, name), times))
    SchedulerRun(scheduler, trials, workers=4, value=value).run()
    return times


class TimedRunner(SimulatedRunner):
    """Measures the milliseconds of the study's own work for each of its trials' reports."""

    def __init__(self) -> None:
        super().__init__(self._play_trial, workers=4)
        self.times: list[float] = []
        self._free = time.thread_time()

    def wait(self, handler: Handler, seconds: float | None = None) -> None:
        spent = time.thread_time() - self._free  # what runs next
        timed_report: list[float] = []
        message, ended = timed(handler.message, timed_report), timed(handler.ended, timed_report)
        super().wait(SimpleNamespace(message=message, ended=ended), seconds)  # type: ignore[arg-type]
        self.times.append(1000 * spent + sum(timed_report))
        self._free = time.thread_time()

    def _play_trial(self, task: Task) -> Play:
        for step in range(task.argument.start + 1, STEPS + 1):
            if (yield 1.0, Report(step, value(task.number, step))) is not Decision.CONTINUE:
                return TrialEnd("interrupted")
        return TrialEnd("returned")


def measure_driver(scheduler: str, trials: int, *, kept: bool = False) -> list[float]:
    """Returns the milliseconds of a whole study for each report, in memory or kept in a folder."""
    runner = TimedRunner()
    with tempfile.TemporaryDirectory() as folder:
        optimize(
            lambda: runner,
            Goal(Space({"rate": {"float": [1e-5, 1e-2], "log": True}, "share": {"float": [0, 1]}})),
            budget=f"{trials} trials",
            sampler=None if scheduler == "pbt" else "random",
            scheduler={"name": scheduler, "max_resource": STEPS},
            out=folder if kept else None,
        )
    return runner.times


def measure_optuna(pruner: optuna.pruners.BasePruner, trials: int) -> list[float]:
    """Returns the milliseconds of each report with its decision."""
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    study = optuna.create_study(pruner=pruner, sampler=optuna.samplers.RandomSampler(seed=0))
    times: list[float] = []
    for number in range(trials):
        trial = study.ask()
        trial.suggest_float("x", 0, 1)

        def decide(step: int, trial: optuna.Trial = trial, number: int = number) -> bool:
            trial.report(value(number, step), step)
            return trial.should_prune()

        decide_timed = timed(decide, times)
        step = 1
        while step <= STEPS and not decide_timed(step):
            step += 1
        study.tell(trial, value(number, min(step, STEPS)))
    return times


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=10_000)
    parser.add_argument("--rows", nargs="+", default=[], help="of the table; all by default")
    options = parser.parse_args()
    count: int = options.trials
    gc.disable()
    print("| scheduler | decisions | median, ms | last, ms | most, ms |\n| --- | ---: | ---: | ---: | ---: |")
    rows: dict[str, Callable[[], list[float]]] = {
        name: lambda name=name: measure(make_scheduler({"name": name, "max_resource": STEPS}), count)  # type: ignore[misc]
        for name in ("asha", "successive_halving", "hyperband", "early_stopping", "pbt")
    }
    rows["driver, asha"] = lambda: measure_driver("asha", count)
    rows["driver and study.db, asha"] = lambda: measure_driver("asha", count, kept=True)
    rows["driver, pbt"] = lambda: measure_driver("pbt", count)
    pruner = optuna.pruners.SuccessiveHalvingPruner(min_resource=1, reduction_factor=3)
    rows["Optuna, successive halving"] = lambda: measure_optuna(pruner, count)
    for name, run in rows.items():
        if options.rows and name not in options.rows:
            continue
        times = run()
        last = median(times[-max(1, len(times) // 10) :])
        print(f"| {name} | {len(times):,} | {median(times):.3f} | {last:.3f} | {max(times):.2f} |", flush=True)


if __name__ == "__main__":
    main()
