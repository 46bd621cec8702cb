"""Rows with the greatest scores, or any at all."""

import numpy as np

from posttrain.select.selectors.closeness import Rows
from posttrain.select.selectors.pool import Pool
from posttrain.store.errors import UserError


def random(pool: Pool, n: int, seed: int) -> Rows:
    """Uniformly drawn rows without replacement."""
    return np.random.default_rng(seed).permutation(pool.free)[:n]


def entropy(pool: Pool, n: int, seed: int) -> Rows:
    """Rows whose predicted distribution has the greatest entropy."""
    return pool.greatest(pool.doubt("entropy"), n)


def least_confidence(pool: Pool, n: int, seed: int) -> Rows:
    """Rows whose most probable label is the least probable."""
    return pool.greatest(pool.doubt("least_confidence"), n)


def margin(pool: Pool, n: int, seed: int) -> Rows:
    """Rows whose two most probable labels are the closest."""
    return pool.greatest(pool.doubt("margin"), n)


def top(pool: Pool, n: int, seed: int, by: str = "loss", lowest: bool = False) -> Rows:
    """Rows with the greatest score of any kind, or with the lowest.

    Args:
        by: a column of one number a row.
        lowest: whether small scores come first.
    """
    values = pool.column(by, "top")
    if values.ndim != 1 or values.dtype.kind not in "biuf":
        raise UserError(f"strategy `top` takes the greatest of one number a record, and `{by}` is something else")
    values = values.astype(np.float64)
    return pool.greatest(-values if lowest else values, n)
