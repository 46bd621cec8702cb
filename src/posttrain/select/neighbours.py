"""Whether records that lie near each other share their label; if not, covering the pool is choosing by noise."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from posttrain.select.selectors.whitening import DIMENSIONS, whiten

MOST = 500
"""Labelled records that tell it well enough: the standard error is at most 0.03 where labels are many."""

_NEARLY_NONE = 0.2  # up to here agreement is "slight": J. R. Landis and G. G. Koch, Biometrics 33, 1977
_ONE_SIDED = 1.645  # 95% of a normal distribution lie below


@dataclass(frozen=True)
class Agreement:
    """Of labelled records with the nearest record's label.

    Attributes:
        kappa: Cohen's, 1 where all agree, 0 where they do as by chance; NaN without records.
        error: its standard error.
        records: that were looked at; none where fewer than two labels are of two records.
    """

    kappa: float
    error: float
    records: int

    @property
    def shared(self) -> bool:
        """Whether neighbours may share labels: kappa is not surely below 0.2, or nothing can be told.

        On Banking77 with ever more noise on embeddings or labels, covering beat drawing at random from kappa 0.2 on,
        and made no difference below 0.1; see BENCHMARKS.md.
        """
        return not self.kappa + _ONE_SIDED * self.error < _NEARLY_NONE


def neighbour_agreement(
    embeddings: npt.NDArray[np.floating],
    labels: Sequence[str] | npt.NDArray[np.generic],
    dimensions: int | None = DIMENSIONS,
) -> Agreement:
    """Cohen's kappa of each record's label with that of the nearest other record.

    Records whose label no other has are left out: nothing could agree with them. The error is that of J. Cohen, A
    Coefficient of Agreement for Nominal Scales (1960).

    Args:
        embeddings: float [N, D].
        labels: [N].
        dimensions: whitened components that nearness goes by, as the strategies' option; None: embeddings as they are.
    """
    _, numbers, counts = np.unique(np.asarray(labels), return_inverse=True, return_counts=True)
    kept = counts[numbers] > 1
    points, numbers = np.asarray(embeddings, np.float32)[kept], numbers[kept]
    count = len(numbers)
    if len(np.unique(numbers)) < 2:
        return Agreement(float("nan"), float("nan"), 0)
    if dimensions is None:
        lengths = np.linalg.norm(points, axis=1, keepdims=True)
        points = (points / np.where(lengths > 0, lengths, 1)).astype(np.float32)
    else:
        points = whiten(points, dimensions)
    cosines = points @ points.T
    np.fill_diagonal(cosines, -np.inf)
    theirs = numbers[cosines.argmax(axis=1)]
    agreed = float((numbers == theirs).mean())
    shares = [np.bincount(one, minlength=len(counts)) / count for one in (numbers, theirs)]
    chance = float(shares[0] @ shares[1])
    error = np.sqrt(agreed * (1 - agreed) / count) / (1 - chance)
    return Agreement((agreed - chance) / (1 - chance), float(error), count)
