"""Greedy choice of rows that cover others: facility location, with exact gains and lazily computed ones.

What a row adds to a cover only shrinks while rows are chosen (the cover is submodular), so that its gain from before
bounds it: M. Minoux, Accelerated greedy algorithms for maximizing submodular set functions, 1978. The greedy cover is
worth at least 1 - 1/e of the best one: G. Nemhauser, L. Wolsey and M. Fisher, Mathematical Programming 14, 1978.
"""

import numpy as np

from posttrain.select.selectors.closeness import Floats, Rows, blocks

_SOME = 32
_MOST = 1024


def cover(similarity: Floats, n: int, before: Floats) -> tuple[Rows, Floats]:
    """Take ``n`` times the row that adds most to the sum over columns of the greatest similarity in a chosen row.

    Args:
        similarity: float32 [M, G], non-negative: how well each candidate covers each of what is to be covered.
        n: rows wanted.
        before: float32 [G], how well each is covered from the start.

    Returns:
        int64 rows in the order of the choice, and what each added; fewer than ``n`` once none adds anything. The lower
        of two rows that add the same is taken first.
    """
    covered = before.copy()
    bounds = np.empty(len(similarity), np.float32)
    for part in blocks(len(bounds), _MOST):
        bounds[part] = _gains(similarity[part], covered)
    exact = np.ones(len(bounds), bool)
    chosen: list[int] = []
    gains: list[float] = []
    while len(chosen) < min(n, len(bounds)):
        some = _SOME
        order = _greatest(bounds, some)
        while not exact[order[0]]:
            stale = order[~exact[order]]
            bounds[stale], exact[stale] = _gains(similarity[stale], covered), True
            some = min(2 * some, _MOST)
            order = _greatest(bounds, some)
        best = int(order[0])
        if bounds[best] <= 0:
            break
        chosen.append(best)
        gains.append(float(bounds[best]))
        np.maximum(covered, similarity[best], out=covered)
        exact[:] = False
    return np.array(chosen, np.int64), np.array(gains, np.float32)


def _gains(similarity: Floats, covered: Floats) -> Floats:
    more = similarity - covered
    found: Floats = np.maximum(more, 0, out=more).sum(axis=1)
    return found


def _greatest(bounds: Floats, count: int) -> Rows:
    """The places of so many of the greatest, greatest first; of equal ones the lowest first."""
    if count >= len(bounds):
        return np.argsort(-bounds, kind="stable")
    least = -np.partition(-bounds, count)[count]
    above = np.flatnonzero(bounds > least)
    together = np.concatenate([above, np.flatnonzero(bounds == least)[: count - len(above)]])
    return together[np.lexsort((together, -bounds[together]))]
