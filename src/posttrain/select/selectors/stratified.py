"""Rows of each stratum in proportion to its size."""

import numpy as np

from posttrain.select.selectors.closeness import Rows
from posttrain.select.selectors.pool import Pool
from posttrain.store.errors import UserError


def stratified(pool: Pool, n: int, seed: int, by: str = "predicted", within: str | None = None) -> Rows:
    """As many rows of each stratum as its share of the free rows, rounded by the greatest remainder.

    Args:
        by: the column of the strata; where it is missing, the most probable labels are.
        within: an uncertainty measure by which rows are taken from a stratum; None to draw them.
    """
    if by == "predicted" and by not in pool.scores:
        strata = np.asarray(pool.column("probabilities", "stratified")).argmax(axis=1)
    else:
        strata = np.asarray(pool.column(by, "stratified")).astype(str)
    if strata.ndim != 1:
        raise UserError(f"strategy `stratified` takes strata of one value a record, and `{by}` has several")
    order = (
        np.random.default_rng(seed).permutation(pool.free)
        if within is None
        else pool.greatest(pool.doubt(within), len(pool))
    )
    _, stratum, sizes = np.unique(strata[order], return_inverse=True, return_counts=True)
    exact = sizes * (n / len(order))
    counts = exact.astype(np.int64)
    counts[np.argsort(-(exact - counts), kind="stable")[: n - counts.sum()]] += 1
    place = np.empty(len(order), np.int64)
    together = np.argsort(stratum, kind="stable")
    place[together] = np.arange(len(order)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    return order[place < counts[stratum]]
