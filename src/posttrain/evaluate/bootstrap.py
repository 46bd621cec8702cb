"""The paired bootstrap: resampled means and ratios.

Pairs that are equal hide how large differences can be: resamples of them alone have no width. So pairs with the largest
difference and with its opposite are added, z^2 / 2 of each times the share of equal pairs: the number that A. Agresti
and B. Caffo, Simple and Effective Confidence Intervals, The American Statistician 54 (2000), add to shares.

Source: B. Efron and R. J. Tibshirani, An Introduction to the Bootstrap (1993), chapter 13 for percentile
intervals."""

import math
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
import pyarrow as pa

from posttrain.store.errors import WorkError

_BLOCK_SIZE = 4_000_000  # draws held in memory at a time
_MAX_DISTINCT = 64  # values up to which counts are drawn instead of records


def resampled_means(
    values: np.ndarray, weights: np.ndarray, n: int, *, seed: int, resamples: int = 10_000
) -> np.ndarray:
    """Resamples a weighted mean.

    Args:
        values: float64 [V].
        weights: float64 [V], how often each is drawn, in proportion.
        n: Draws of a resample.
        seed: Seed of the resamples.
        resamples: Number of resamples.

    Returns:
        float64 [resamples].
    """
    # The mean of a resample depends only on how often each distinct value was drawn, and those counts are multinomial.
    # Distinct values are sorted, so that the order of the records does not change what the seed draws.
    distinct, index = np.unique(values, return_inverse=True)
    shares = np.bincount(index, weights) / weights.sum()
    generator = np.random.default_rng(seed)
    if len(distinct) <= _MAX_DISTINCT:
        return np.asarray(generator.multinomial(n, shares, size=resamples) @ distinct / n)
    width = max(1, _BLOCK_SIZE // n)
    blocks = [min(width, resamples - start) for start in range(0, resamples, width)]
    return np.concatenate([generator.choice(distinct, (size, n), p=shares).mean(axis=1) for size in blocks])


@dataclass(frozen=True)
class RatioInterval:
    """Ratio of two mean scores on the same records with its interval, from ``n`` pairs."""

    ratio: float
    low: float
    high: float
    n: int


def added_pairs(candidate: np.ndarray, champion: np.ndarray, level: float) -> tuple[float, float]:
    """Returns the difference of the two pairs that are added, which have opposite signs, and the weight of each."""
    differences = np.abs(candidate - champion)
    low, high = min(candidate.min(), champion.min()), max(candidate.max(), champion.max())
    largest = float(differences.max()) or max(1.0, float(high - low))
    return largest, NormalDist().inv_cdf((1 + level) / 2) ** 2 / 2 * float((differences == 0).mean())


def resampled_ratios(
    scores: np.ndarray, reference: np.ndarray, *, seed: int, resamples: int = 10_000, level: float = 0.95
) -> np.ndarray:
    """Resamples the ratio of two mean scores, in pairs; infinite where the reference's mean is 0, 1 where both are.

    Args:
        scores: float [N], one per record, 0 or more.
        reference: float [N], the same records in the same order.
        seed: Seed of the resamples.
        resamples: Number of resamples.
        level: Coverage of the interval that is read from them, between 0 and 1.

    Returns:
        float64 [resamples].

    Raises:
        ValueError: as `paired_differences`, or a score is negative, as a log-likelihood is: its ratio means nothing.
    """
    paired_differences(scores, reference)
    pairs = np.stack([np.asarray(scores, np.float64), np.asarray(reference, np.float64)], axis=1)
    if pairs.min() < 0:
        raise ValueError("a ratio of negative scores has no meaning")
    distinct, counts = np.unique(pairs, axis=0, return_counts=True)
    largest, added = added_pairs(pairs[:, 0], pairs[:, 1], level)
    distinct = np.concatenate([distinct, [[largest, 0], [0, largest]]])
    shares = np.concatenate([counts, [added, added]]) / (len(pairs) + 2 * added)
    # The counts of distinct pairs are multinomial, see `resampled_means`; of scores that all differ, each count is
    # that of a record.
    generator, n = np.random.default_rng(seed), len(pairs)
    width = max(1, _BLOCK_SIZE // len(distinct))
    sums = np.concatenate(
        [
            generator.multinomial(n, shares, size=min(width, resamples - start)) @ distinct
            for start in range(0, resamples, width)
        ]
    )
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios = sums[:, 0] / sums[:, 1]
    return np.where(sums[:, 1] > 0, ratios, np.where(sums[:, 0] > 0, np.inf, 1.0))


def ratio_bootstrap(
    scores: np.ndarray, reference: np.ndarray, *, seed: int, resamples: int = 10_000, level: float = 0.95
) -> RatioInterval:
    """Computes the percentile bootstrap interval of the ratio of two mean scores; see `resampled_ratios`."""
    ratios = resampled_ratios(scores, reference, seed=seed, resamples=resamples, level=level)
    mine, other = float(np.mean(scores)), float(np.mean(reference))
    ratio = mine / other if other > 0 else math.inf if mine > 0 else 1.0
    # Linear interpolation between an infinite and a finite resample has no value.
    low, high = np.quantile(ratios, [(1 - level) / 2, (1 + level) / 2], method="nearest")
    # Added pairs pull the resamples to one: the ratio itself stays inside.
    return RatioInterval(ratio, min(float(low), ratio), max(float(high), ratio), len(scores))


def paired_scores(candidate: pa.Table, champion: pa.Table) -> tuple[np.ndarray, np.ndarray]:
    """Returns the scores of the records that both predictions tables hold, in the order of the candidate's.

    Returns:
        Two float64 [N].

    Raises:
        WorkError: if they share no record.
    """
    # By id and not by row: where one table has more records, rows would pair different ones.
    champion_scores = dict(zip(champion["id"].to_pylist(), champion["score"].to_pylist(), strict=True))
    pairs = [
        (score, champion_scores[id])
        for id, score in zip(candidate["id"].to_pylist(), candidate["score"].to_pylist(), strict=True)
        if id in champion_scores
    ]
    if not pairs:
        raise WorkError("candidate and champion were evaluated on different records: nothing to compare")
    scores = np.array(pairs, np.float64)
    return scores[:, 0], scores[:, 1]


def paired_differences(candidate: np.ndarray, champion: np.ndarray) -> np.ndarray:
    """Returns the candidate's scores minus the champion's, float64 [N].

    Raises:
        ValueError: the lengths differ, there are no records or a score is not finite.
    """
    candidate_scores, champion_scores = np.asarray(candidate, np.float64), np.asarray(champion, np.float64)
    if candidate_scores.shape != champion_scores.shape or candidate_scores.ndim != 1:
        raise ValueError(
            f"scores must be two arrays [N], got shapes {candidate_scores.shape} and {champion_scores.shape}"
        )
    if len(candidate_scores) == 0:
        raise ValueError("no records to compare")
    values = candidate_scores - champion_scores
    if not np.isfinite(values).all():
        raise ValueError("scores must be finite")
    return values
