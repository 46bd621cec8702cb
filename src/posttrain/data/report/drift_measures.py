"""Measures drift: Jensen–Shannon divergence of categories, population stability index of numbers, and maximum mean
discrepancy of embeddings.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from posttrain.data.report.distribution import Counts, Distribution, Floats

MIN_DIVERGENCE = 0.01
"""A distance (the root of the divergence) of 0.1 is where Evidently and NannyML speak of drift by default."""

_LISTED = 1000

MODERATE, LARGE = 0.1, 0.25
"""Marks of credit scoring: below the first no change, above the second a large one (Siddiqi, "Credit Risk Scorecards",
2006; earlier in Lewis, "An Introduction to Credit Scoring", 1994)."""

LEAST_SHARE = 1e-4
"""Stands for a bin's share where it is empty, whose logarithm has no value; the default of Evidently."""

_BINS = 10

_PERMUTATIONS_AT_ONCE = 256


@dataclass(frozen=True)
class Divergence:
    """Holds the divergence of one set of categories.

    Attributes:
        divergence: in bits, between 0 and 1.
        by_chance: what two samples of one distribution have on average, about.
        p_value: of Pearson's chi-square test of homogeneity; None where counts are not independent, as of words.
        old, new: counts by category, those first whose share changed most.
    """

    name: str
    divergence: float
    by_chance: float
    p_value: float | None
    old: dict[str, int]
    new: dict[str, int]

    @property
    def distance(self) -> float:
        """Square root of the divergence, which is a metric."""
        return float(np.sqrt(self.divergence))

    @property
    def shifted(self) -> bool:
        """True if the divergence exceeds 0.01 and chance, and the test is significant at 0.01."""
        return self.divergence >= max(MIN_DIVERGENCE, self.by_chance) and (self.p_value is None or self.p_value < 0.01)

    def to_json(self) -> dict[str, Any]:
        return {
            "divergence": self.divergence,
            "distance": self.distance,
            "shifted": self.shifted,
            "by_chance": self.by_chance,
            "p_value": self.p_value,
            "old": dict(list(self.old.items())[:_LISTED]),
            "new": dict(list(self.new.items())[:_LISTED]),
        }


def jensen_shannon(old: npt.ArrayLike, new: npt.ArrayLike) -> float:
    """Computes the divergence in bits of two rows of counts [K], neither all zeros (Lin, IEEE Trans. Inf. Theory 1991).

    The mean of both Kullback–Leibler divergences from the mean of both distributions: 0 for equal shares, 1 for
    shares that have nothing in common.
    """
    before, after = (np.asarray(counts, dtype=np.float64) / np.sum(counts, dtype=np.float64) for counts in (old, new))
    middle = (before + after) / 2
    total = 0.0
    for counts in (before, after):
        # 0 ln 0 is 0 in the limit; NumPy gives NaN.
        there = counts > 0
        total += float(counts[there] @ np.log2(counts[there] / middle[there])) / 2
    # Rounding may leave it just outside, and its root would be NaN.
    return min(max(total, 0.0), 1.0)


def divergence(name: str, old: Mapping[str, int], new: Mapping[str, int], *, independent: bool = True) -> Divergence:
    """Computes the divergence of two sets of counts by category, each with a count above zero.

    Args:
        independent: whether each count is a record by itself, so that a test of significance has a meaning.
    """
    names = sorted(set(old) | set(new))
    counts = np.array([[counts_of_version.get(name, 0) for name in names] for counts_of_version in (old, new)])
    # Small samples diverge by chance alone, so the divergence is only meaningful beside its mean under no change.
    value, chance = jensen_shannon(*counts), divergence_by_chance(counts)
    p_value = homogeneity(counts) if independent else None
    shares = counts / counts.sum(axis=1, keepdims=True)
    order = np.argsort(-np.abs(shares[1] - shares[0]), kind="stable")
    ordered = [{names[at]: int(row[at]) for at in order.tolist()} for row in counts]
    return Divergence(name, value, chance, p_value, *ordered)


def divergence_by_chance(counts: npt.NDArray[np.int64]) -> float:
    """Mean divergence, about, of two samples with the sizes of ``counts`` [2, K] from one distribution.

    Near equality the divergence is the chi-square distance over ``8 ln 2``, whose mean is ``(K - 1)(1/n + 1/m)``.
    """
    present = int((counts.sum(axis=0) > 0).sum())
    return float((present - 1) * (1 / counts.sum(axis=1)).sum() / (8 * np.log(2)))


def homogeneity(counts: npt.NDArray[np.int64]) -> float:
    """p-value of Pearson's chi-square test that both rows of counts [2, K] come from one distribution."""
    from scipy.stats import chi2_contingency

    # A category that neither has would expect 0, and divide by it.
    there = counts[:, counts.sum(axis=0) > 0]
    return float(chi2_contingency(there, correction=False).pvalue) if there.shape[1] > 1 else 1.0


@dataclass(frozen=True)
class PopulationStability:
    """Holds the population stability index of one number.

    Attributes:
        index: 0 for equal shares of all bins.
        by_chance: what two samples of one distribution have on average.
        p_value: of Pearson's chi-square test over the same bins, which holds for small samples too.
        edges: the bins' upper edges but the last one's, which has none; empty where the bins are categories.
        old, new: each bin's share of the records.
    """

    name: str
    index: float
    by_chance: float
    p_value: float
    edges: tuple[float, ...]
    old: tuple[float, ...]
    new: tuple[float, ...]

    @property
    def level(self) -> str:
        """``stable``, ``moderate`` or ``shifted`` by the thresholds; ``stable`` if chance explains it (p >= 0.01)."""
        if self.index < MODERATE or self.p_value >= 0.01:
            return "stable"
        return "moderate" if self.index < LARGE else "shifted"

    def to_json(self) -> dict[str, Any]:
        return {
            "index": self.index,
            "level": self.level,
            "by_chance": self.by_chance,
            "p_value": self.p_value,
            "upper_edges": list(self.edges),
            "old_shares": list(self.old),
            "new_shares": list(self.new),
        }


def population_stability(name: str, old: Distribution, new: Distribution) -> PopulationStability:
    """The index ``sum((new - old) * ln(new / old))`` over the shares of bins, of two distributions that hold something.

    Bins are the older one's deciles, upper edges included; equal deciles are one. Where the first decile is the
    smallest value, what is below it has a bin of its own: a number that was constant must not move unseen.
    Under no change the index is about ``(B - 1)(1/n + 1/m)``, B being the number of bins (Yurdakul and Naranjo,
    "Statistical properties of the population stability index", 2020), unless small samples leave bins empty.
    """
    edges = np.unique([old.quantile(share / _BINS) for share in range(1, _BINS)])
    # A decile at the maximum would make a last bin that nothing can fall into.
    edges = edges[edges < max(old.values[-1], new.values[-1])]
    if not edges.size:
        edges = old.values[:1]
    # A number that was constant must not move unseen below its only value.
    if edges[0] == old.values[0]:
        edges = np.concatenate([[np.nextafter(edges[0], -np.inf)], edges])
    counts = np.array([_bin_counts(version, edges) for version in (old, new)])
    return _stability(name, counts, tuple(edges.tolist()))


def category_stability(name: str, old: Counts, new: Counts) -> PopulationStability:
    """The index of `population_stability` over categories, such as clusters; counts int64 [B] that hold something."""
    return _stability(name, np.array([old, new]), ())


def _stability(name: str, counts: npt.NDArray[np.int64], edges: tuple[float, ...]) -> PopulationStability:
    """Computes the index from the counts [2, B] of the bins."""
    sizes = counts.sum(axis=1)
    shares = counts / sizes[:, None]
    # An empty bin has no logarithm; the floor bounds its contribution.
    before, after = (np.maximum(version, LEAST_SHARE) for version in shares)
    index = float(np.sum((after - before) * np.log(after / before)))
    filled = int((counts.sum(axis=0) > 0).sum())
    chance = float((filled - 1) * (1 / sizes).sum())
    return PopulationStability(name, index, chance, homogeneity(counts), edges, *map(tuple, shares.tolist()))


def _bin_counts(distribution: Distribution, edges: Floats) -> Counts:
    bins = np.searchsorted(edges, distribution.values, side="left")
    return np.bincount(bins, weights=distribution.counts, minlength=len(edges) + 1).astype(np.int64)


@dataclass(frozen=True)
class MeanDiscrepancy:
    """Holds the maximum mean discrepancy and its permutation test.

    Attributes:
        squared: the unbiased estimate of MMD², which may be below zero.
        p_value: ``(b + 1) / (permutations + 1)``, b being how many permutations reach it.
        bandwidth: of the kernel, in the embeddings' unit.
        rows: how many embeddings of each side were compared.
        embedder: what made the embeddings, in words.
    """

    squared: float
    p_value: float
    bandwidth: float
    rows: tuple[int, int]
    embedder: str = ""

    @property
    def shifted(self) -> bool:
        """True if chance explains the discrepancy with less than 1% probability."""
        return self.p_value < 0.01

    def to_json(self) -> dict[str, Any]:
        return {
            "mmd_squared": self.squared,
            "p_value": self.p_value,
            "shifted": self.shifted,
            "bandwidth": self.bandwidth,
            "rows": list(self.rows),
            "embedder": self.embedder,
        }


def mean_discrepancy(
    old: npt.NDArray[np.float32],
    new: npt.NDArray[np.float32],
    *,
    permutations: int = 999,
    seed: int = 0,
    embedder: str = "",
) -> MeanDiscrepancy:
    """Computes MMD² between embeddings [N, D] and [M, D], with N and M at least 2, and its permutation test.

    The unbiased estimate (Gretton et al., "A kernel two-sample test", JMLR 2012, equation 3) with the kernel
    ``exp(-|x - y|² / (2 b²))``, b being the median distance between any two of all N + M. The p-value counts what
    was measured as one of the permutations, so that it is never 0 (Phipson and Smyth 2010). Takes 8 (N + M)² bytes
    a few times over: sample before.

    Raises:
        ValueError: fewer than two rows, or rows of different length.
    """
    if min(len(old), len(new)) < 2 or old.shape[1] != new.shape[1]:
        raise ValueError(f"embeddings of the shapes {old.shape} and {new.shape} cannot be compared")
    kernel, bandwidth = _kernel(np.concatenate([old, new]).astype(np.float64))
    count, total = len(old), len(kernel)
    rng = np.random.default_rng(seed)
    first = np.arange(total) < count
    # Measured by the same code as the permutations, so that rounding is the same.
    squared = float(_squared_mmd(kernel, first[:, None], count)[0])
    # A permutation that only swaps equal rows reaches it, but for rounding.
    limit, reached = squared - 1e-12, 0
    for start in range(0, permutations, _PERMUTATIONS_AT_ONCE):
        columns = min(_PERMUTATIONS_AT_ONCE, permutations - start)
        # Permuting labels instead of rows keeps one kernel matrix for all permutations.
        sides = rng.permuted(np.repeat(first[:, None], columns, axis=1), axis=0)
        reached += int((_squared_mmd(kernel, sides, count) >= limit).sum())
    p_value = (reached + 1) / (permutations + 1)
    return MeanDiscrepancy(squared, p_value, bandwidth, (count, total - count), embedder)


def _kernel(points: npt.NDArray[np.float64]) -> tuple[npt.NDArray[np.float64], float]:
    """The kernel between all points [T, D], with zeros on its diagonal, and its bandwidth."""
    points = points - points.mean(axis=0)  # far from 0, differences of squares lose digits
    lengths = (points**2).sum(axis=1)
    squares = lengths[:, None] + lengths - 2 * points @ points.T
    squares[squares < 1e-12 * lengths.mean()] = 0.0  # equal points, but for rounding
    distances = np.sqrt(squares[np.triu_indices(len(points), 1)])
    bandwidth = float(np.median(distances)) or float(distances.mean()) or 1.0
    kernel = np.exp(squares / (-2 * bandwidth**2))
    np.fill_diagonal(kernel, 0.0)
    return kernel, bandwidth


def _squared_mmd(kernel: npt.NDArray[np.float64], first: npt.NDArray[np.bool_], count: int) -> npt.NDArray[np.float64]:
    """MMD² of each column [P] of ``first`` [N + M, P], which marks the ``count`` rows of the first side.

    Args:
        kernel: [N + M, N + M] with zeros on its diagonal, which the unbiased estimate leaves out.
    """
    sides = first.astype(np.float64)
    reached = kernel @ sides
    within = (sides * reached).sum(axis=0)
    across = ((1 - sides) * reached).sum(axis=0)
    others = kernel.sum() - within - 2 * across
    rest = len(kernel) - count
    return np.asarray(
        within / (count * (count - 1)) + others / (rest * (rest - 1)) - 2 * across / (count * rest), dtype=np.float64
    )
