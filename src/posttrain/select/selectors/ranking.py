"""Selectors that rank rows by one number: random, uncertainty, density, cost; and stratified quotas."""

import numpy as np

from posttrain.select.selectors.pool import Pool, min_max_scale
from posttrain.select.selectors.similarity import DIMENSIONS, Cosine, Rows
from posttrain.store.errors import UserError


def random(pool: Pool, n: int, seed: int) -> Rows:
    """Chooses uniformly drawn rows without replacement."""
    return np.random.default_rng(seed).permutation(pool.unlabelled_rows)[:n]


def entropy(pool: Pool, n: int, seed: int) -> Rows:
    """Chooses rows whose predicted distribution has the greatest entropy."""
    return pool.top(pool.uncertainty("entropy"), n)


def least_confidence(pool: Pool, n: int, seed: int) -> Rows:
    """Chooses rows whose most probable label is the least probable."""
    return pool.top(pool.uncertainty("least_confidence"), n)


def margin(pool: Pool, n: int, seed: int) -> Rows:
    """Chooses rows whose two most probable labels are the closest."""
    return pool.top(pool.uncertainty("margin"), n)


def top(pool: Pool, n: int, seed: int, by: str = "loss", lowest: bool = False) -> Rows:
    """Chooses rows with the greatest score of any kind, or with the lowest.

    Args:
        by: a column of one number a row.
        lowest: take the lowest scores instead.
    """
    values = pool.column(by)
    if values.ndim != 1 or values.dtype.kind not in "biuf":
        raise UserError(f"strategy `top` takes the greatest of one number a record, and `{by}` is something else")
    values = values.astype(np.float64)
    return pool.top(-values if lowest else values, n)


def density_weighted(
    pool: Pool, n: int, seed: int, by: str = "entropy", weight: float = 1.0, dimensions: int | None = DIMENSIONS
) -> Rows:
    """Chooses rows with the greatest ``u * density ** weight``: B. Settles and M. Craven, EMNLP 2008, equation 13.

    Density is the mean over the pool of (1 + cosine) / 2; uncertainty u is scaled to [0, 1].

    Args:
        by: ``entropy``, ``least_confidence`` or ``margin``.
        weight: exponent of the density.
        dimensions: number of principal components; None for the embeddings as they are.
    """
    pool.check_numbers(weight=weight)
    cosine = Cosine.from_rows(pool.whitened_embeddings(dimensions))
    # The mean of the cosines is the cosine with the mean of the unit vectors: no matrix of all pairs.
    mean = np.einsum("nd,n->d", cosine.points, cosine.scales, dtype=np.float64) / max(1, len(pool))
    density = (1 + (cosine.points @ mean.astype(np.float32)) * cosine.scales) / 2
    return pool.top(min_max_scale(pool.uncertainty(by), pool.unlabelled_rows) * np.maximum(density, 0) ** weight, n)


def cost_aware(pool: Pool, n: int, seed: int, by: str = "entropy", budget: float | None = None) -> Rows:
    """Chooses rows with the greatest uncertainty, scaled to [0, 1], for their ``cost``, a column in any unit.

    Args:
        by: ``entropy``, ``least_confidence`` or ``margin``.
        budget: greatest cost of a whole batch; a row that would exceed it is skipped, so that fewer than ``n`` may be
            chosen. None for no bound.
    """
    pool.check_numbers(budget=budget)
    cost = np.asarray(pool.column("cost"), np.float64)
    if not (cost[pool.unlabelled_rows] > 0).all() or not np.isfinite(cost[pool.unlabelled_rows]).all():
        raise UserError("strategy `cost_aware`: every `cost` must be a positive number")
    order = pool.top(min_max_scale(pool.uncertainty(by), pool.unlabelled_rows) / cost, len(pool))
    if budget is None:
        return order[:n]
    chosen: list[int] = []
    # Greedy by worth for cost; a row that is too dear is passed over for a cheaper one behind it.
    remaining = budget - float(cost[pool.batch].sum())
    for row in order.tolist():
        if len(chosen) < n and cost[row] <= remaining:
            chosen.append(row)
            remaining -= cost[row]
    return np.array(chosen, np.int64)


def stratified(pool: Pool, n: int, seed: int, by: str = "predicted", within: str | None = None) -> Rows:
    """Chooses as many rows of each stratum as its share of the unlabelled rows, rounded by the greatest remainder.

    Args:
        by: the column of the strata; where it is missing, the most probable labels are.
        within: the uncertainty measure that ranks the rows of a stratum; None to draw them.
    """
    if by == "predicted" and by not in pool.scores:
        strata = np.asarray(pool.column("probabilities")).argmax(axis=1)
    else:
        strata = np.asarray(pool.column(by)).astype(str)
    if strata.ndim != 1:
        raise UserError(f"strategy `stratified` takes strata of one value a record, and `{by}` has several")
    order = (
        np.random.default_rng(seed).permutation(pool.unlabelled_rows)
        if within is None
        else pool.top(pool.uncertainty(within), len(pool))
    )
    _, stratum, sizes = np.unique(strata[order], return_inverse=True, return_counts=True)
    exact = sizes * (n / len(order))
    counts = exact.astype(np.int64)
    # The greatest remainders are rounded up; of equal ones the stratum that sorts first.
    counts[np.argsort(-(exact - counts), kind="stable")[: n - counts.sum()]] += 1
    rank = np.empty(len(order), np.int64)
    together = np.argsort(stratum, kind="stable")
    rank[together] = np.arange(len(order)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    return order[rank < counts[stratum]]
