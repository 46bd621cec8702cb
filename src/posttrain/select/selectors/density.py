"""Rows that the model is unsure of and that are like many others."""

import numpy as np

from posttrain.select.selectors.closeness import Cosine, Rows
from posttrain.select.selectors.pool import Pool, normalised
from posttrain.select.selectors.whitening import DIMENSIONS


def density_weighted(
    pool: Pool, n: int, seed: int, by: str = "entropy", weight: float = 1.0, dimensions: int | None = DIMENSIONS
) -> Rows:
    """Rows with the greatest ``doubt * density ** weight``: B. Settles and M. Craven, EMNLP 2008, equation 13.

    Density is the mean over the pool of (1 + cosine) / 2; doubt is put between 0 and 1.

    Args:
        by: ``entropy``, ``least_confidence`` or ``margin``.
        weight: how much density counts.
        dimensions: principal components that are kept; None for the embeddings as they are.
    """
    cosine = Cosine.between_rows_of(pool.points("density_weighted", dimensions))
    mean = np.einsum("nd,n->d", cosine.points, cosine.scales, dtype=np.float64) / max(1, len(pool))
    density = (1 + (cosine.points @ mean.astype(np.float32)) * cosine.scales) / 2
    return pool.greatest(normalised(pool.doubt(by), pool.free) * np.maximum(density, 0) ** weight, n)
