"""The interval of candidate minus champion on the same records.

Right-or-wrong scores have the score interval of T. Tango, Equivalence test and confidence interval for the difference
in proportions for the paired-sample design, Statistics in Medicine 17 (1998), equations 2 to 5: it has a width where no
record differs. A quarter of a record as continuity correction keeps its coverage at the level or above for 20 to 500
records and shares of .5 to .995; without it 93.2% of 95% are covered (benchmarks/results/evaluation.md).

Other scores have a percentile bootstrap with the added pairs of `bootstrap.py`.
"""

import math
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from posttrain.evaluate.bootstrap import added_pairs, paired_differences, resampled_means
from posttrain.models.bounded_mean import is_binary

_CORRECTION = 0.25  # of a record

_BISECTIONS = 50


@dataclass(frozen=True)
class Interval:
    """Mean of candidate minus champion with its interval, from ``n`` pairs of which ``differing`` are not equal."""

    difference: float
    low: float
    high: float
    n: int
    differing: int


def paired_interval(
    candidate: np.ndarray, champion: np.ndarray, *, seed: int, resamples: int = 10_000, level: float = 0.95
) -> Interval:
    """Computes the interval of the mean paired difference.

    Args:
        candidate: float [N], one score a record.
        champion: float [N], the same records in the same order.
        seed: Seed of the resamples; right-or-wrong scores need none.
        resamples: Number of resamples.
        level: Coverage, between 0 and 1.

    Raises:
        ValueError: if the lengths differ, there are no records or a score is not finite.
    """
    # In pairs, so that what makes a record hard for both models cancels.
    values = paired_differences(candidate, champion)
    n, better, worse = len(values), int((values > 0).sum()), int((values < 0).sum())
    mean = float(values.mean())
    if is_binary(candidate) and is_binary(champion):
        return Interval(mean, *score_interval(better, worse, n, level), n, better + worse)
    largest, added = added_pairs(candidate, champion, level)
    pairs = np.concatenate([values, [largest, -largest]])
    weights = np.concatenate([np.ones(n), [added, added]])
    means = resampled_means(pairs, weights, n, seed=seed, resamples=resamples)
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
    # Added pairs pull the resamples to zero: the mean itself stays inside.
    return Interval(mean, min(float(low), mean), max(float(high), mean), n, better + worse)


def score_interval(better: int, worse: int, n: int, level: float = 0.95) -> tuple[float, float]:
    """Computes the interval of a difference of two shares of the same records.

    Args:
        better: Records that only the candidate has right.
        worse: Records that only the champion has right.
        n: All records, 1 or more.
        level: Coverage, between 0 and 1.

    Returns:
        Lower and upper end, from -1 to 1.
    """
    z = NormalDist().inv_cdf((1 + level) / 2)
    return _lower_end(better, worse, n, z), -_lower_end(worse, better, n, z)


def _lower_end(better: int, worse: int, n: int, z: float) -> float:
    """Finds the difference below which the score test rejects; its statistic falls as the difference rises."""
    low, high = -1.0, (better - worse) / n
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        rejected = better - worse - n * middle - _CORRECTION > z * math.sqrt(_variance(middle, better, worse, n))
        low, high = (middle, high) if rejected else (low, middle)
    return low


def _variance(difference: float, better: int, worse: int, n: int) -> float:
    """Computes the variance of better - worse, with the likeliest share of ``worse`` under that difference."""
    b = (2 * n - better + worse) * difference - better - worse
    c = -worse * difference * (1 - difference)
    share = (math.sqrt(max(0.0, b * b - 8 * n * c)) - b) / (4 * n)
    return max(0.0, n * (2 * share + difference * (1 - difference)))
