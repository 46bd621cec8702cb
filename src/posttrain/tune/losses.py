"""The values of a study that can be compared, and the losses that a model is fitted to."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from posttrain.tune.parameters import Choice, Int
from posttrain.tune.space import Space
from posttrain.tune.trial import Trial, TrialState

FEWEST = 10
"""Trials with comparable values, below which nothing is said about importance."""

MAX_ROWS = 200
"""Trials that a Gaussian process sees: half of them the best, half the newest; its time grows with the cube."""

_TRIALS_PER_PARAMETER = 10  # the rule n = 10 d for computer experiments (Loeppky, Sacks and Welch 2009)

_LEAST_TRANSFORMED = 5  # different losses, below which their distribution is not known

_REACH = 4.0


@dataclass(frozen=True)
class Comparable:
    """Values of trials that can be compared, as all have been trained equally long.

    Attributes:
        values: by the trial's number.
        step: the step of all values; None: the final values of finished trials.
    """

    values: Mapping[int, float]
    step: int | None = None


def comparable_values(space: Space, trials: Sequence[Trial]) -> Comparable:
    """Returns the values that say most about a space.

    These are the final ones of finished trials; but where most trials were stopped or paused, and too few for the space
    have finished, those at the last step that enough have reported. A failed trial has none.
    """
    finished = {t.number: t.value for t in trials if t.state is TrialState.FINISHED and t.value is not None}
    by_step: dict[int, dict[int, float]] = {}
    for trial in trials:
        if trial.state is not TrialState.FAILED:
            for report in trial.reports:
                by_step.setdefault(report.step, {})[trial.number] = report.value
    candidates = [Comparable(finished), *(Comparable(by_step[step], step) for step in sorted(by_step, reverse=True))]
    half = sum(trial.latest is not None for trial in trials) / 2
    enough = min(half, max(FEWEST, _wanted_trials(space)))
    last = next((candidate for candidate in candidates if len(candidate.values) >= enough), None)
    return last or max(candidates, key=lambda candidate: len(candidate.values))


def _wanted_trials(space: Space) -> int:
    """Returns how many trials a space needs by rule: ten a parameter, or all of its points where they are fewer."""
    sizes: list[float] = []
    for parameter in space.parameters.values():
        if isinstance(parameter, Choice):
            sizes.append(len(parameter.values))
        else:
            sizes.append(parameter.high - parameter.low + 1 if isinstance(parameter, Int) else math.inf)
    return int(min(_TRIALS_PER_PARAMETER * len(sizes), math.prod(sizes)))


def worst_shown(values: np.ndarray, maximize: bool = False) -> float:
    """Returns the worst value of interest: others lie so far off that they would hide all differences.

    That is the worst within four times the distance from the best value to the worst quarter; normal values never lie
    beyond, and trainings that have diverged do.
    """
    signed = -values if maximize else values
    best, quarter = np.quantile(signed, (0, 0.75)).tolist()
    # Where three quarters are the same, nothing lies within.
    worst = float(signed[signed <= best + _REACH * (quarter - best)].max() if quarter > best else signed.max())
    return -worst if maximize else worst


def standardize(losses: Sequence[float]) -> np.ndarray:
    """Returns losses of mean 0 and deviation 1, float64 [n].

    Losses that lie so far off that they would hide all differences count as the worst of the others.
    """
    values = np.array(losses, np.float64)
    values = np.minimum(values, worst_shown(values))
    standard: np.ndarray = (values - values.mean()) / (values.std() or 1.0)
    return standard


def to_normal(values: np.ndarray) -> np.ndarray:
    """Returns standardised losses in the same order and nearer to a normal distribution, float64 [n] of mean 0.

    That is the likeliest power transform of Yeo and Johnson (2000, Biometrika 87), standardised. Its power
    is 0 to 2, at most a logarithm: where a search has tried many points near one, the likeliest power would make all
    others alike.
    """
    from scipy.stats import yeojohnson, yeojohnson_normmax

    if len(np.unique(values)) < _LEAST_TRANSFORMED:
        return values
    power = min(max(float(yeojohnson_normmax(values)), 0.0), 2.0)
    transformed = yeojohnson(values, power)
    normal: np.ndarray = (transformed - transformed.mean()) / transformed.std()
    return normal


def newest_and_best(losses: dict[int, float]) -> list[int]:
    """Returns the trials that a process is fitted to: all, or of too many the best and the newest."""
    if len(losses) <= MAX_ROWS:
        return sorted(losses)
    best = sorted(losses, key=lambda number: (losses[number], number))[: MAX_ROWS // 2]
    newest = [number for number in sorted(losses, reverse=True) if number not in best][: MAX_ROWS - len(best)]
    return sorted([*best, *newest])
