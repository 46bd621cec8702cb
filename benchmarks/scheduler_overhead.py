"""Measures how long a scheduler takes for a decision when a study has many trials, beside Optuna's pruners.

    python benchmarks/scheduler_overhead.py [--trials 10000]

Ours: each call of ``choose``, ``started``, ``report`` and ``ended`` of a study on made-up curves. Optuna's: a report
and ``should_prune`` of a trial in a study in memory; its pruners look at all trials. Times are of the thread's own
processor time, in milliseconds, so that other programs do not count. ``last`` is the median over the last tenth of the
trials, when the study is largest. Python's garbage collector is off: what it walks is this script's own record.
"""

import argparse
import gc
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import optuna

from posttrain.testing.schedulers import SchedulerRun
from posttrain.tune.curves import extrapolate
from posttrain.tune.schedulers.base import Decision, Scheduler
from posttrain.tune.schedulers.moasha import MoAsha
from posttrain.tune.schedulers.registry import make_scheduler

STEPS = 81

METHODS = ("choose", "started", "report", "ended")


def value(number: int, step: int) -> float:
    """Returns the value of a trial at a step: a curve that falls to an end of its own."""
    return number * 7919 % 10007 / 10007 + 1 / step


class ThreeObjectives(MoAsha):
    """Takes a value for three, of which the others hang on it and on the trial."""

    def report(self, number: int, step: int, value: float) -> Decision:
        others = number * 104729 % 10007 / 10007, number * 1299709 % 10007 / 10007
        return self.report_values(number, step, (value, *(other - value / 10 for other in others)))


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
    options = parser.parse_args()
    count: int = options.trials
    gc.disable()
    extrapolate([1, 2], [1.0, 0.5], 3).probability_below(0.0)  # loads SciPy
    print("| scheduler | decisions | median, ms | last, ms | most, ms |\n| --- | ---: | ---: | ---: | ---: |")
    rows: dict[str, Callable[[], list[float]]] = {
        name: lambda name=name: measure(make_scheduler({"name": name, "max_resource": STEPS}), count)  # type: ignore[misc]
        for name in ("asha", "successive_halving", "hyperband", "early_stopping")
    }
    rows["successive_halving, one bracket"] = lambda: measure(
        make_scheduler({"name": "successive_halving", "max_resource": STEPS, "trials": count}), count
    )
    rows["moasha, three objectives"] = lambda: measure(ThreeObjectives(STEPS), count)
    # Each report computes an extrapolation: a tenth of the trials shows its cost.
    rows[f"extrapolation, {count // 10:,} trials"] = lambda: measure(
        make_scheduler({"name": "extrapolation", "max_resource": STEPS}), count // 10
    )
    pruner = optuna.pruners.SuccessiveHalvingPruner(min_resource=1, reduction_factor=3)
    rows["Optuna, successive halving"] = lambda: measure_optuna(pruner, count)
    for name, run in rows.items():
        times = run()
        last = median(times[-max(1, len(times) // 10) :])
        print(f"| {name} | {len(times):,} | {median(times):.3f} | {last:.3f} | {max(times):.2f} |", flush=True)


if __name__ == "__main__":
    main()
