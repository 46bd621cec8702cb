"""Selectors that rank rows by one number: random, and uncertainty by any measure."""

import numpy as np

from posttrain.select.selectors.pool import Pool
from posttrain.select.selectors.similarity import Rows


def random(pool: Pool, n: int, seed: int) -> Rows:
    """Chooses uniformly drawn rows without replacement."""
    return np.random.default_rng(seed).permutation(pool.unlabelled_rows)[:n]


def entropy(pool: Pool, n: int, seed: int) -> Rows:
    """Chooses rows whose predicted distribution has the greatest entropy."""
    return top(pool, n, seed, "entropy")


def least_confidence(pool: Pool, n: int, seed: int) -> Rows:
    """Chooses rows whose most probable label is the least probable."""
    return top(pool, n, seed, "least_confidence")


def margin(pool: Pool, n: int, seed: int) -> Rows:
    """Chooses rows whose two most probable labels are the closest."""
    return top(pool, n, seed, "margin")


def top(pool: Pool, n: int, seed: int, by: str = "entropy") -> Rows:
    """Chooses the rows that the model is least sure of.

    Args:
        by: a measure of uncertainty, or a score of ``select.scores``.
    """
    return pool.top(pool.uncertainty(by), n)
