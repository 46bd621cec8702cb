"""Whether records that lie near each other share their label; if not, covering the pool is choosing by noise."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from posttrain.select.selectors.whitening import whiten

MOST = 500
"""Labelled records that are looked at: no more are needed, and each has to be embedded."""

_LEAST = 150  # of fewer, the nearest is too far away to say anything where a label has several topics
_HARDLY = 0.2  # up to here agreement is "slight": J. R. Landis and G. G. Koch, Biometrics 33, 1977
_ONE_SIDED = 1.645  # 95% of a normal distribution lie below


@dataclass(frozen=True)
class Agreement:
    """Of labelled records with the nearest record's label.

    Attributes:
        kappa: Cohen's, 1 where all agree, 0 where they do as by chance; NaN without records.
        highest: that kappa may be, at 95%.
        records: that were looked at; none where fewer than two labels are of two records.
    """

    kappa: float
    highest: float
    records: int

    @property
    def shared(self) -> bool:
        """Whether neighbours may share labels: with 150 records or more, kappa may be 0.2.

        The bar is the literature's. On Banking77 with noise on embeddings or labels, covering gained much above it, and
        below little; on GSM8K's classes, far below it, covering did harm (see BENCHMARKS.md).
        """
        return self.records < _LEAST or self.highest >= _HARDLY


def neighbour_agreement(
    embeddings: npt.NDArray[np.floating],
    labels: Sequence[str] | npt.NDArray[np.generic],
    pool: npt.NDArray[np.floating],
) -> Agreement:
    """Cohen's kappa of each record's label with that of the nearest other record.

    Records whose label no other has are left out: nothing could agree with them. How high kappa may be is taken from
    Wilson's interval of the share that agrees (E. B. Wilson, JASA 22, 1927), chance agreement as it was found.

    Args:
        embeddings: float [N, D].
        labels: [N].
        pool: float [M, D], what strategies choose from: whitened together with it, the records are near each other
            where they are for the strategies.
    """
    _, numbers, counts = np.unique(np.asarray(labels), return_inverse=True, return_counts=True)
    kept = counts[numbers] > 1
    numbers = numbers[kept]
    count = len(numbers)
    if len(np.unique(numbers)) < 2:
        return Agreement(float("nan"), float("nan"), 0)
    points = whiten(np.concatenate([embeddings, pool]))[: len(embeddings)][kept]
    cosines = points @ points.T
    np.fill_diagonal(cosines, -np.inf)
    theirs = numbers[cosines.argmax(axis=1)]
    agreed = float((numbers == theirs).mean())
    shares = [np.bincount(one, minlength=len(counts)) / count for one in (numbers, theirs)]
    chance = float(shares[0] @ shares[1])
    kappa, highest = ((share - chance) / (1 - chance) for share in (agreed, _highest_share(agreed, count)))
    return Agreement(kappa, highest, count)


def _highest_share(share: float, count: int) -> float:
    """The upper end of Wilson's interval."""
    weight = _ONE_SIDED**2 / count
    spread = _ONE_SIDED * math.sqrt(share * (1 - share) / count + weight / (4 * count))
    return (share + weight / 2 + spread) / (1 + weight)
