"""Measures how often each stopping rule stops the training that would have been the best, on recorded learning curves.

    python benchmarks/stopping_rules.py [--trials 40] [--seeds 100]

For each of the three tasks of ``curves.csv`` (`record_curves.py`) and each seed, random settings are tried in turn by
one worker, with each rule. A winner is the training with the least last value, had all run to their ends. The table has
the share of winners that a rule ended before that, how much worse the best finished training is (median and mean over
studies, in nats a token), and the compute as a share of running all to the end. Successive halving and its like choose
who goes on; early stopping and extrapolation who ends.

The second table is the calibration of the rule ``extrapolation`` after 40 trainings, drawn at random, have finished:
over as many further trainings and their parts from the third on, the predicted probability that the last value lies
below the median of the 40 (or below their best tenth), and how often it does. The third has the forecasts before the
rule widens them by what finished trainings had missed.
"""

import argparse
import math
import random
from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any

import numpy as np
from search_problems import Problem, problem
from search_vs_peers import space_of

from posttrain.tune.api import optimize
from posttrain.tune.backends.simulated import CurvePoint, SimulatedBackend
from posttrain.tune.curves import extrapolate
from posttrain.tune.schedulers.extrapolation import Extrapolation

TASKS = ("round 1", "round 2", "round 3")

RULES: dict[str, dict[str, Any]] = {
    "asha": {"name": "asha"},
    "successive halving": {"name": "successive_halving"},
    "hyperband": {"name": "hyperband"},
    "early stopping": {"name": "early_stopping"},
    "extrapolation": {"name": "extrapolation"},
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
        lambda: SimulatedBackend(curve),
        space_of(task),
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


def forecasts(task: Problem, trials: int, seed: int) -> Iterator[tuple[float, float, bool]]:
    """Yields probabilities, of the rule and before it widens them, and whether the training ended below the bound."""
    generator = random.Random(seed)
    rule = Extrapolation(task.parts, min_resource=task.parts)  # which stops none of those that it learns from
    curves = [task.curve(task.draw(generator)) for _ in range(trials)]
    for number, curve in enumerate(curves):
        rule.started(number, task.parts, {})
        for step, value in enumerate(curve, start=1):
            rule.report(number, step, value)
        rule.ended(number, curve[-1])
    ends = np.array([curve[-1] for curve in curves])
    low, centre, high = np.quantile(ends, [0.25, 0.5, 0.75])
    scale = max((high - low) / 1.349, 1e-9)
    bounds = (float(np.quantile(ends, 0.1)), float(centre))
    for curve in (task.curve(task.draw(generator)) for _ in range(trials)):
        for part in range(3, task.parts):
            steps, values = list(range(1, part + 1)), curve[:part]
            widened = rule.forecast(steps, values)
            assert widened is not None, "more have finished than the rule waits for"
            narrow = extrapolate(steps, values, task.parts, float(centre), float(scale))
            for bound in bounds:
                yield widened.probability_below(bound), narrow.probability_below(bound), curve[-1] < bound


def print_calibration(title: str, predicted: np.ndarray, below: np.ndarray) -> None:
    """Prints how often came true what was predicted, by ranges of the prediction."""
    print(f"\n| {title} | forecasts | mean predicted | observed |\n| --- | ---: | ---: | ---: |")
    edges = (0.0, 0.05, 0.2, 0.4, 0.6, 0.8, 0.95, 1.0 + 1e-9)
    for low, high in pairwise(edges):
        inside = (predicted >= low) & (predicted < high)
        if inside.any():
            means = f"{predicted[inside].mean():.1%} | {below[inside].mean():.1%}"
            print(f"| {low:.0%} to {min(high, 1):.0%} | {inside.sum():,} | {means} |")
    score, base = np.mean((predicted - below) ** 2), below.mean() * (1 - below.mean())
    print(f"\nBrier score {score:.4f}; of the base rate {base:.4f}")


def main() -> None:
    """Prints all tables."""
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
    pairs = [pair for task in tasks for seed in range(options.seeds // 10) for pair in forecasts(task, 40, seed)]
    widened, narrow, below = (np.array(column, dtype=float) for column in zip(*pairs, strict=True))
    print_calibration("predicted by the rule", widened, below)
    print_calibration("before it widens", narrow, below)


if __name__ == "__main__":
    main()
