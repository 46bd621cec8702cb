"""Rows whose gradients would be large and unlike each other."""

import numpy as np

from posttrain.select.selectors.closeness import OuterProducts, Rows
from posttrain.select.selectors.pool import Pool
from posttrain.select.selectors.seeding import by_squared_distance


def badge(pool: Pool, n: int, seed: int, dimensions: int | None = None) -> Rows:
    """Rows drawn by k-means++ on the gradients of the last layer: J. Ash et al., ICLR 2020.

    The gradient of a row's loss, if its most probable label were right, is ``(probabilities - label) ⊗ embedding``. It
    is never formed. The first row is drawn by its gradient's squared length.

    Args:
        dimensions: principal components of the embeddings that are kept; None for the embeddings as they are.
    """
    probabilities = np.array(pool.column("probabilities", "badge"), np.float32)
    probabilities[np.arange(len(pool)), probabilities.argmax(axis=1)] -= 1
    gradients = OuterProducts.between_rows_of(probabilities, pool.points("badge", dimensions))
    weights = np.where(pool.labelled, 0.0, 1.0)
    lengths = weights * gradients.halves.astype(np.float64)
    generator = np.random.default_rng(seed)
    return by_squared_distance(gradients, n, generator, weights, first=lengths if lengths.any() else weights)
