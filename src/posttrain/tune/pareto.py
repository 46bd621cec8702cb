"""Pareto arithmetic: dominance, fronts and knees. Less is better in every coordinate.

A point dominates another if it is nowhere worse and somewhere better. Equal points do not dominate each other.
"""

import numpy as np


def is_dominated(points: np.ndarray, point: np.ndarray) -> np.bool_:
    """Returns whether one of the points, float64 [N, K], dominates the point, float64 [K]."""
    return ((points <= point).all(axis=1) & (points < point).any(axis=1)).any()


def front_mask(points: np.ndarray) -> np.ndarray:
    """Returns which points are dominated by none, bool [N].

    Args:
        points: float64 [N, K].
    """
    mask = np.zeros(len(points), dtype=bool)
    kept: list[int] = []
    # In lexicographic order a point can be dominated only by those before it, and so by those of the front so far.
    for index in np.lexsort(points.T[::-1]):
        if not is_dominated(points[kept], points[index]):
            kept.append(int(index))
    mask[kept] = True
    return mask


def scale_to_range(points: np.ndarray) -> np.ndarray:
    """Returns points, float64 [N, K], with each coordinate scaled to 0 at its least value and 1 at its greatest."""
    low: np.ndarray = points.min(axis=0)
    high: np.ndarray = points.max(axis=0)
    scaled: np.ndarray = (points - low) / np.where(high > low, high - low, 1.0)
    return scaled


def knee(points: np.ndarray) -> int:
    """Returns the index of the point that is nearest to the least value of every coordinate at once.

    The distance is Euclidean, over coordinates scaled to their range: the compromise of Zeleny (1973) with p = 2. Where
    a front has a knee, that is it; a straight one gives its middle.

    Args:
        points: float64 [N, K], of one front.
    """
    return int(np.argmin((scale_to_range(points) ** 2).sum(axis=1)))
