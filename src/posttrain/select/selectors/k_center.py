"""Rows that leave no other far from a chosen one."""

import numpy as np

from posttrain.select.selectors.closeness import Euclidean, Floats, Rows
from posttrain.select.selectors.farthest import farthest_first
from posttrain.select.selectors.pool import Pool
from posttrain.select.selectors.whitening import DIMENSIONS


def k_center(pool: Pool, n: int, seed: int, dimensions: int | None = DIMENSIONS) -> Rows:
    """Always the row farthest from all that have a label or are chosen (T. Gonzalez, 1985; core-set, O. Sener and S.
    Savarese, ICLR 2018): the greatest distance that is left is at most twice the least possible.

    Where nothing has a label yet, the row nearest to the mean is the first.

    Args:
        dimensions: principal components that are kept; None for the embeddings as they are.
    """
    points = pool.points("k_center", dimensions)
    closeness = Euclidean.between_rows_of(points)
    worth = np.where(pool.labelled, -np.inf, 0).astype(np.float32)
    before = pool.chosen
    first = np.empty(0, np.int64)
    if not len(before):
        first = before = np.array([_most_central(points, closeness)])
        worth[first] = -np.inf
    return np.concatenate([first, farthest_first(closeness, n - len(first), worth, 1.0, before)])


def _most_central(points: Floats, closeness: Euclidean) -> int:
    mean = points.mean(axis=0, dtype=np.float64).astype(np.float32)
    return int(np.argmax(points @ mean - closeness.halves))
