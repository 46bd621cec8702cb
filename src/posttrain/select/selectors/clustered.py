"""Rows that cover the pool, or the part of it that the model is unsure of, by k-means."""

import numpy as np

from posttrain.select.selectors.closeness import Rows
from posttrain.select.selectors.diversity import nearest_to_centres
from posttrain.select.selectors.pool import Pool
from posttrain.select.selectors.whitening import DIMENSIONS


def diverse(pool: Pool, n: int, seed: int, dimensions: int | None = DIMENSIONS, mini_batch: int | None = None) -> Rows:
    """Rows that cover the pool, whatever the model predicts of them: those nearest to the centres of ``n`` clusters.

    Args:
        dimensions: principal components that are kept; None for the embeddings as they are.
        mini_batch: rows that k-means looks at in a step, such as 8,192, for a large pool in less time; None for all.
    """
    return nearest_to_centres(pool.points("diverse", dimensions), n, seed, pool.free, mini_batch=mini_batch)


def uncertain_diverse(
    pool: Pool, n: int, seed: int, pool_factor: int = 6, by: str = "entropy", dimensions: int | None = DIMENSIONS
) -> Rows:
    """Rows that cover the uncertain part of the pool.

    The ``pool_factor * n`` most uncertain rows are clustered with their uncertainty as weight, and the row nearest to
    each centre is taken (F. Zhdanov, Diverse mini-batch Active Learning, arXiv:1901.05954, 2019). Uncertainty alone
    fills a batch with near-duplicates of one hard question; diversity alone asks what the model knows already. The
    factor was the best of a few in one run on Banking77 (a linear model, 60 to 64%): a choice, not a finding.

    Args:
        pool_factor: how many times more rows than wanted are clustered.
        by: ``entropy``, ``least_confidence`` or ``margin``.
        dimensions: principal components that are kept; None for the embeddings as they are.
    """
    points = pool.points("uncertain_diverse", dimensions)
    doubt = pool.doubt(by)
    candidates = pool.greatest(doubt, max(1, pool_factor) * n)
    pull = np.nan_to_num(np.maximum(doubt[candidates] + (1.0 if by == "margin" else 0.0), 0.0))
    return nearest_to_centres(points, n, seed, candidates, pull)
