"""Measures how often each stopping rule stops the training that would have been the best, on recorded learning curves.

    python benchmarks/stopping_rules.py [--trials 40] [--seeds 100]

For each of the three tasks of ``curves.csv`` (`record_curves.py`) and each seed, random settings are tried in turn by
one worker, with each rule. A winner is the training with the least last value, had all run to their ends. The table has
the share of winners that a rule ended before that, how much worse the best finished training is (median and mean over
studies, in nats a token), and the compute as a share of running all to the end. Successive halving and its like choose
who continues; early stopping who ends.
"""

import argparse
import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from search_problems import Problem, problem
from search_vs_peers import space_of

from posttrain.tune.api import optimize
from posttrain.tune.goal import Goal
from posttrain.tune.runs import CurvePoint, replay

TASKS = ("round 1", "round 2", "round 3")

RULES: dict[str, dict[str, Any]] = {
    "asha": {"name": "asha"},
    "successive halving": {"name": "successive_halving"},
    "hyperband": {"name": "hyperband"},
    "early stopping": {"name": "early_stopping"},
}


def study(task: Problem, rule: Mapping[str, Any], trials: int, seed: int) -> tuple[bool, float, float]:
    """Returns whether the winner was ended, by how much the best finished one is worse, and the share of compute."""
    parts = 0

    def curve(settings: Mapping[str, Any]) -> Iterator[CurvePoint]:
        nonlocal parts
        for value in task.curve(settings):
            parts += 1
            yield CurvePoint(value)

    result = optimize(
        lambda: replay(curve),
        Goal(space_of(task)),
        budget=trials,
        sampler="random",
        scheduler={**rule, "max_resource": task.parts},
        seed=seed,
    )
    ends = [task.curve(trial.settings)[-1] for trial in result.trials]
    finished = [len(trial.reports) == task.parts for trial in result.trials]
    best = min(ends)
    reached = min((end for end, whole in zip(ends, finished, strict=True) if whole), default=math.inf)
    return reached > best, reached - best, parts / (len(ends) * task.parts)


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--trials", type=int, default=40)
    parser.add_argument("--seeds", type=int, default=100)
    options = parser.parse_args()
    tasks = [problem(name) for name in TASKS]
    print("| rule | winners ended | worse by, median | mean | compute |\n| --- | ---: | ---: | ---: | ---: |")
    for name, rule in RULES.items():
        rows = [study(task, rule, options.trials, seed) for task in tasks for seed in range(options.seeds)]
        ended, worse, compute = map(np.array, zip(*rows, strict=True))
        row = f"{ended.mean():.0%} | {np.median(worse):.3f} | {worse.mean():.3f} | {compute.mean():.0%}"
        print(f"| {name} | {row} |", flush=True)


if __name__ == "__main__":
    main()
