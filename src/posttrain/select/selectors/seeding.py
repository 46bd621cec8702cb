"""Rows drawn by their squared distance to those drawn before: k-means++ (D. Arthur and S. Vassilvitskii, SODA 2007).

Exact without a pass over all rows for each draw: a squared distance only shrinks while rows are drawn, so that a row
proposed by what its distance was is kept with the share of it that is left.
"""

import numpy as np
import numpy.typing as npt

from posttrain.select.selectors.closeness import Closeness, Rows, closest

Weights = npt.NDArray[np.float64]

_PROPOSALS = 64
_FEW = 1 / 4


def by_squared_distance(
    closeness: Closeness, n: int, generator: np.random.Generator, weights: Weights, first: Weights | None = None
) -> Rows:
    """Draw ``n`` distinct rows, each by its weight times its squared distance to the nearest one drawn before.

    Args:
        closeness: minus half the squared distance of N rows.
        n: at most as many as there are positive weights.
        generator: of the draws.
        weights: float64 [N], non-negative.
        first: float64 [N], the odds of the first row, of those with a weight; None for the weights.

    Returns:
        int64 [n] in the order of the draws. Once all rows left are where one was drawn already, by their weights alone.
    """
    drawn = [_by(weights if first is None else first, generator)]
    distances = np.full(len(weights), np.inf)
    known = 0
    while len(drawn) < n:
        found = closest(closeness, np.arange(len(weights)), np.array(drawn[known:]))
        distances = np.minimum(distances, -2.0 * found.astype(np.float64))
        distances[drawn] = 0
        known = len(drawn)
        if not (weights * distances).any():
            break
        drawn += _drawn(closeness, n - len(drawn), generator, weights, distances)
    left = weights.copy()
    left[drawn] = 0
    while len(drawn) < n:
        drawn.append(_by(left, generator))
        left[drawn[-1]] = 0
    return np.array(drawn[:n], np.int64)


def _drawn(
    closeness: Closeness, most: int, generator: np.random.Generator, weights: Weights, distances: Weights
) -> list[int]:
    """Rows drawn until most proposals are in vain, as ``distances`` no longer say how far rows are from those drawn."""
    odds = np.cumsum(weights * distances)
    drawn: list[int] = []
    tried = 0
    while len(drawn) < most and (len(drawn) >= tried * _FEW or tried < _PROPOSALS):
        rows = np.minimum(np.searchsorted(odds, generator.random(_PROPOSALS) * odds[-1], side="right"), len(odds) - 1)
        luck = generator.random(_PROPOSALS)
        left = distances[rows]
        if drawn:
            left = np.minimum(left, -2.0 * closest(closeness, rows, np.array(drawn)))
        among = -2.0 * closeness.between(rows, rows).astype(np.float64)
        for place, row in enumerate(rows.tolist()):
            if luck[place] * distances[row] < left[place] and row not in drawn and len(drawn) < most:
                drawn.append(row)
                left = np.minimum(left, among[place])
        tried += _PROPOSALS
    return drawn


def _by(weights: Weights, generator: np.random.Generator) -> int:
    odds = np.cumsum(weights)
    place = int(np.searchsorted(odds, generator.random() * odds[-1], side="right"))
    return min(place, int(np.flatnonzero(weights)[-1]))
