"""Rows that tell most for what their labels cost."""

import numpy as np

from posttrain.select.selectors.closeness import Rows
from posttrain.select.selectors.pool import Pool, normalised
from posttrain.store.errors import UserError


def cost_aware(pool: Pool, n: int, seed: int, by: str = "entropy", budget: float | None = None) -> Rows:
    """Rows with the greatest doubt, put between 0 and 1, for their ``cost``, a column in any unit.

    Args:
        by: ``entropy``, ``least_confidence`` or ``margin``.
        budget: what all of a batch may cost together; a row that would exceed it is left out, so that fewer than ``n``
            may be chosen. None for no bound.
    """
    cost = np.asarray(pool.column("cost", "cost_aware"), np.float64)
    if not (cost[pool.free] > 0).all() or not np.isfinite(cost[pool.free]).all():
        raise UserError("strategy `cost_aware`: every `cost` must be a positive number")
    order = pool.greatest(normalised(pool.doubt(by), pool.free) / cost, len(pool))
    if budget is None:
        return order[:n]
    chosen: list[int] = []
    left = budget - float(cost[pool.batch].sum())
    for row in order.tolist():
        if len(chosen) < n and cost[row] <= left:
            chosen.append(row)
            left -= cost[row]
    return np.array(chosen, np.int64)
