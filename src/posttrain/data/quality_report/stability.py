"""The population stability index: how far a number's distribution has moved."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from posttrain.data.quality_report.distribution import Counts, Distribution, Floats
from posttrain.data.quality_report.divergence import homogeneity

MODERATE, LARGE = 0.1, 0.25
"""Marks of credit scoring: below the first no change, above the second a large one (Siddiqi, "Credit Risk Scorecards",
2006; earlier in Lewis, "An Introduction to Credit Scoring", 1994)."""

LEAST_SHARE = 1e-4
"""Stands for a bin's share where it is empty, whose logarithm has no value; the default of Evidently."""

_BINS = 10


@dataclass(frozen=True)
class Stability:
    """The index of one number.

    Attributes:
        index: 0 for equal shares of all bins.
        by_chance: what two samples of one distribution have on average.
        p_value: of Pearson's chi-square test over the same bins, which holds for small samples too.
        edges: the bins' upper edges but the last one's, which has none.
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
        """``stable``, ``moderate`` or ``shifted`` by the marks, and ``stable`` where chance explains it (p >= 0.01)."""
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


def stability(name: str, old: Distribution, new: Distribution) -> Stability:
    """The index ``sum((new - old) * ln(new / old))`` over the shares of bins, of two distributions that hold something.

    Bins are the older one's deciles, upper edges included; equal deciles are one. Where the first decile is the
    smallest value, what is below it has a bin of its own: a number that was constant must not move unseen.
    Under no change the index is about ``(B - 1)(1/n + 1/m)``, B being the number of bins (Yurdakul and Naranjo,
    "Statistical properties of the population stability index", 2020), unless small samples leave bins empty.
    """
    edges = np.unique([old.quantile(share / _BINS) for share in range(1, _BINS)])
    edges = edges[edges < max(old.values[-1], new.values[-1])]
    if not edges.size:
        edges = old.values[:1]
    if edges[0] == old.values[0]:
        edges = np.concatenate([[np.nextafter(edges[0], -np.inf)], edges])
    counts = np.array([_counts(one, edges) for one in (old, new)])
    shares = counts / counts.sum(axis=1, keepdims=True)
    before, after = (np.maximum(one, LEAST_SHARE) for one in shares)
    index = float(np.sum((after - before) * np.log(after / before)))
    filled = int((counts.sum(axis=0) > 0).sum())
    chance = (filled - 1) * (1 / old.count + 1 / new.count)
    told = (tuple(one) for one in (edges.tolist(), *shares.tolist()))
    return Stability(name, index, chance, homogeneity(counts), *told)


def _counts(one: Distribution, edges: Floats) -> Counts:
    bins = np.searchsorted(edges, one.values, side="left")
    return np.bincount(bins, weights=one.counts, minlength=len(edges) + 1).astype(np.int64)
