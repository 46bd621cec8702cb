"""The Jensen–Shannon divergence: how far the shares of categories have moved."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

SHIFTED = 0.01
"""A distance (the root of the divergence) of 0.1 is where Evidently and NannyML speak of drift by default."""

_LISTED = 1000


@dataclass(frozen=True)
class Divergence:
    """The divergence of one set of categories.

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
        """The root of the divergence, which is a metric."""
        return float(np.sqrt(self.divergence))

    @property
    def shifted(self) -> bool:
        """Whether it is above 0.01 and above chance, and the test says so at the level 0.01."""
        return self.divergence >= max(SHIFTED, self.by_chance) and (self.p_value is None or self.p_value < 0.01)

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
    """Divergence in bits of two rows of counts [K], neither of which is all zeros (Lin, IEEE Trans. Inf. Theory 1991).

    The mean of both Kullback–Leibler divergences from the mean of both distributions: 0 for equal shares, 1 for
    shares that have nothing in common.
    """
    before, after = (np.asarray(one, dtype=np.float64) / np.sum(one, dtype=np.float64) for one in (old, new))
    middle = (before + after) / 2
    total = 0.0
    for one in (before, after):
        there = one > 0
        total += float(one[there] @ np.log2(one[there] / middle[there])) / 2
    return min(max(total, 0.0), 1.0)


def divergence(name: str, old: Mapping[str, int], new: Mapping[str, int], *, independent: bool = True) -> Divergence:
    """The divergence of two sets of counts by category, each with a count above zero.

    Args:
        independent: whether each count is a record by itself, so that a test of significance has a meaning.
    """
    names = sorted(set(old) | set(new))
    counts = np.array([[one.get(name, 0) for name in names] for one in (old, new)])
    value, chance = jensen_shannon(*counts), by_chance(counts)
    p_value = homogeneity(counts) if independent else None
    shares = counts / counts.sum(axis=1, keepdims=True)
    order = np.argsort(-np.abs(shares[1] - shares[0]), kind="stable")
    ordered = [{names[at]: int(row[at]) for at in order.tolist()} for row in counts]
    return Divergence(name, value, chance, p_value, *ordered)


def by_chance(counts: npt.NDArray[np.int64]) -> float:
    """The mean divergence, about, of two samples with the sizes of ``counts`` [2, K] from one distribution.

    Near equality the divergence is the chi-square distance over ``8 ln 2``, whose mean is ``(K - 1)(1/n + 1/m)``.
    """
    present = int((counts.sum(axis=0) > 0).sum())
    return float((present - 1) * (1 / counts.sum(axis=1)).sum() / (8 * np.log(2)))


def homogeneity(counts: npt.NDArray[np.int64]) -> float:
    """p-value of Pearson's chi-square test that both rows of counts [2, K] come from one distribution."""
    from scipy.stats import chi2_contingency

    there = counts[:, counts.sum(axis=0) > 0]
    return float(chi2_contingency(there, correction=False).pvalue) if there.shape[1] > 1 else 1.0
