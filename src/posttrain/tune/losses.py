"""The losses that a model of a study is fitted to."""

from collections.abc import Sequence

import numpy as np

from posttrain.tune.importance import worst_shown

MAX_ROWS = 200
"""Trials that a Gaussian process sees: half of them the best, half the newest; its time grows with the cube."""

_LEAST_TRANSFORMED = 5  # different losses, below which their distribution is not known


def standardize(losses: Sequence[float]) -> tuple[np.ndarray, tuple[float, float]]:
    """Returns losses of mean 0 and deviation 1, float64 [n], and the mean and the deviation that they had.

    Losses that lie so far off that they would hide all differences count as the worst of the others.
    """
    values = np.array(losses, np.float64)
    values = np.minimum(values, worst_shown(values))
    mean, deviation = float(values.mean()), float(values.std())
    return (values - mean) / (deviation or 1.0), (mean, deviation or 1.0)


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
