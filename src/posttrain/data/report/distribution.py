"""Summarises numbers in bounded memory; the result does not depend on the order of numbers and tables."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Counts = npt.NDArray[np.int64]

_KEPT_BITS = 10
_QUANTILES = (0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99)


@dataclass(frozen=True)
class Distribution:
    """Counts rounded numbers.

    Attributes:
        values: float64 [B], rising; numbers keep 11 significant bits, so whole numbers up to 2048 are exact and
            others are off by at most 0.05% (the buckets of HdrHistogram, but rounded to the nearest).
        counts: int64 [B].
        missing: how many were null, NaN or infinite.
        low, high: the exact smallest and greatest; NaN where there are none.
    """

    values: Floats
    counts: Counts
    missing: int = 0
    low: float = float("nan")
    high: float = float("nan")

    @property
    def count(self) -> int:
        return int(self.counts.sum())

    @property
    def mean(self) -> float:
        return float(self.values @ self.counts / self.count)

    @property
    def deviation(self) -> float:
        """Standard deviation of the population."""
        return float(np.sqrt((self.values - self.mean) ** 2 @ self.counts / self.count))

    def quantile(self, share: float) -> float:
        """Smallest value that at least ``share`` of all do not exceed: NumPy's ``inverted_cdf``."""
        # The factor keeps rounding of the share from skipping a value.
        at = np.searchsorted(np.cumsum(self.counts), share * self.count * (1 - 1e-12))
        return float(self.values[min(int(at), len(self.values) - 1)])

    def to_json(self) -> dict[str, Any]:
        """Count, mean, deviation, smallest, greatest, quantiles and a histogram; only counts without numbers."""
        if not self.count:
            return {"count": 0, "missing": self.missing}
        edges, (counts,), (above,) = histograms([self])
        return {
            "count": self.count,
            "missing": self.missing,
            "mean": self.mean,
            "standard_deviation": self.deviation,
            "smallest": self.low,
            "greatest": self.high,
            "quantiles": {f"{share:g}": self.quantile(share) for share in _QUANTILES},
            "histogram": {"edges": edges.tolist(), "counts": counts.tolist(), "above": above},
        }


class DistributionBuilder:
    """Collects numbers and builds a `Distribution`."""

    def __init__(self) -> None:
        self._counts: dict[float, int] = {}
        self._missing = 0
        self._low, self._high = float("inf"), float("-inf")

    def add(self, values: Floats) -> None:
        """Counts float64 [N]; NaN and infinite values are missing."""
        finite = values[np.isfinite(values)]
        self._missing += len(values) - len(finite)
        if not finite.size:
            return
        self._low, self._high = min(self._low, float(finite.min())), max(self._high, float(finite.max()))
        values, counts = np.unique(round_significant(finite), return_counts=True)
        for value, count in zip(values.tolist(), counts.tolist(), strict=True):
            self._counts[value] = self._counts.get(value, 0) + count

    def distribution(self) -> Distribution:
        values = np.array(sorted(self._counts), dtype=np.float64)
        counts = np.array([self._counts[value] for value in values.tolist()], dtype=np.int64)
        if not values.size:
            return Distribution(values, counts, self._missing)
        return Distribution(values, counts, self._missing, self._low, self._high)


def round_significant(values: Floats) -> Floats:
    """Rounds finite float64 [N] to 11 significant bits, ties away from zero."""
    # Rounding the mantissa bounds the number of buckets whatever the range, and keeps the relative error constant.
    dropped = 52 - _KEPT_BITS
    limit = np.finfo(np.float64).max / 2
    bits = np.ascontiguousarray(np.clip(values, -limit, limit)).view(np.int64)
    rounded = (bits + (1 << (dropped - 1))) & ~np.int64((1 << dropped) - 1)
    return np.asarray(rounded.view(np.float64) + 0.0)  # and no negative zero


def histograms(distributions: Sequence[Distribution], most: int = 30) -> tuple[Floats, list[Counts], list[int]]:
    """Histograms over one axis, of at most ``most`` bins of one round width.

    The axis ends at the greatest of the 99th percentiles where the greatest value is far beyond it.

    Returns:
        Edges float64 [B + 1], the counts int64 [B] of each distribution, and how many of it lie above the last edge.
        Bins hold their lower edge, not their upper one.
    """
    filled = [distribution for distribution in distributions if distribution.count]
    if not filled:
        return np.zeros(1), [np.zeros(0, dtype=np.int64) for _ in distributions], [0] * len(distributions)
    low, high = (
        min(distribution.values[0] for distribution in filled),
        max(distribution.values[-1] for distribution in filled),
    )
    usual = max(distribution.quantile(0.99) for distribution in filled)
    # A few outliers would squeeze all else into one bin; they are counted above the last edge.
    if high - low > 1.5 * (usual - low) > 0:
        high = usual
    # Bins of fractional width over whole numbers would hold 1 or 2 of them by turns, and look like a comb.
    whole = all(np.array_equal(distribution.values, np.rint(distribution.values)) for distribution in filled)
    width = _round_width((high - low) / (most - 1), whole)
    first = np.floor(low / width)
    bins = int(np.floor(high / width) - first) + 1
    edges = (first + np.arange(bins + 1)) * width
    # The small shift keeps a value that equals an edge, but for rounding, from falling into the bin below.
    placed = [
        np.searchsorted(edges, distribution.values + 1e-9 * width, side="right") - 1 for distribution in distributions
    ]
    counts = [
        np.bincount(at.clip(0, bins), weights=distribution.counts, minlength=bins + 1).astype(np.int64)
        for at, distribution in zip(placed, distributions, strict=True)
    ]
    return edges, [distribution[:bins] for distribution in counts], [int(distribution[bins]) for distribution in counts]


def _round_width(least: float, whole: bool) -> float:
    """1, 2 or 5 times a power of ten, and not below ``least``; whole numbers have bins of whole width."""
    least = max(least, 1.0) if whole else least or 1.0
    power = 10.0 ** np.floor(np.log10(least))
    return float(next(power * factor for factor in (1, 2, 5, 10) if power * factor >= least * (1 - 1e-9)))
