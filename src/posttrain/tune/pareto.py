"""Pareto arithmetic: dominance, fronts, ε-nets, knees and hypervolume. Less is better in every coordinate.

A point dominates another if it is nowhere worse and somewhere better. Equal points do not dominate each other.
"""

from collections.abc import Collection, Sequence

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


class Fronts:
    """Points sorted into fronts, one point after another: the first front is dominated by none, the second by none but
    the first, and so on (non-dominated sorting; Deb et al. 2002).

    A new point only moves points that it dominates, each to the next front (Li et al. 2014, arXiv:1401.2810), so that
    a rung of thousands of trials is not sorted anew with each report.

    Attributes:
        members: the keys of each front, in the order of their coming to it.
    """

    def __init__(self) -> None:
        self.members: list[list[int]] = []
        self._points: list[np.ndarray] = []  # of each front, float64 [n, K]

    def __len__(self) -> int:
        return sum(len(keys) for keys in self.members)

    def add(self, key: int, point: Sequence[float]) -> None:
        """Adds a point, float [K], under a key."""
        keys, points = [key], np.array([point], dtype=np.float64)
        level = self._level(points[0])
        while level < len(self.members):
            members, front = self.members[level], self._points[level]
            # Of the points that come, none dominates another: they were of one front, or are one.
            beaten = (points[:, None] <= front).all(axis=2) & (points[:, None] < front).any(axis=2)
            moved = beaten.any(axis=0)
            stay, leave = np.flatnonzero(np.logical_not(moved)), np.flatnonzero(moved)
            self.members[level] = [members[index] for index in stay] + keys
            self._points[level] = np.concatenate([front[stay], points])
            if len(leave) == 0:
                return
            keys, points = [members[index] for index in leave], front[leave]
            level += 1
        self.members.append(keys)
        self._points.append(points)

    def _level(self, point: np.ndarray) -> int:
        """Returns the first front none of whose points dominates the point."""
        low, high = 0, len(self.members)
        while low < high:  # if a front has such a point, those before it have one, too
            middle = (low + high) // 2
            if is_dominated(self._points[middle], point):
                low = middle + 1
            else:
                high = middle
        return low

    def farthest(self, level: int, chosen: Collection[int]) -> int:
        """Returns the key of a front that is the `farthest` from chosen ones."""
        members = self.members[level]
        return members[farthest(self._points[level], [index for index, key in enumerate(members) if key in chosen])]


def farthest(points: np.ndarray, chosen: Sequence[int]) -> int:
    """Returns the index of the point that is the farthest from the nearest chosen one: a step of a greedy ε-net.

    Without chosen ones that is the point with the least first coordinate (Salinas et al. 2021, arXiv:2106.05680). The
    distance is Euclidean, over coordinates scaled to their range, as seconds and losses have no common unit. Of equally
    far ones the first is taken.

    Args:
        points: float64 [N, K].
        chosen: indices of fewer than N points.
    """
    if not chosen:
        return int(np.argmin(points[:, 0]))
    scaled = scale_to_range(points)
    distances = ((scaled[:, None] - scaled[None, list(chosen)]) ** 2).sum(axis=2).min(axis=1)
    distances[list(chosen)] = -1.0  # a point that equals a chosen one has a distance of 0
    return int(np.argmax(distances))


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


def hypervolume(points: np.ndarray, reference: np.ndarray) -> float:
    """Returns the volume of what points dominate, up to a reference point (Zitzler and Thiele 1998), exactly.

    Slices along the last coordinate: their number of coordinates falls by one each time (While et al. 2006).

    Args:
        points: float64 [N, K]; those that are not below the reference in every coordinate add nothing.
        reference: float64 [K].
    """
    inside = points[(points < reference).all(axis=1)]
    if len(inside) == 0:
        return 0.0
    if points.shape[1] == 1:
        return float(reference[0] - inside.min())
    if points.shape[1] == 2:
        inside = inside[np.argsort(inside[:, 0])]
        # Each point adds what lies below all before it; a dominated one nothing.
        floors = np.minimum.accumulate(np.append(reference[1], inside[:, 1]))
        return float((reference[0] - inside[:, 0]) @ (floors[:-1] - floors[1:]))
    inside = inside[front_mask(inside)]
    inside = inside[np.argsort(inside[:, -1])]
    depths = np.diff(np.append(inside[:, -1], reference[-1]))
    return sum(
        float(depth) * hypervolume(inside[: index + 1, :-1], reference[:-1])
        for index, depth in enumerate(depths)
        if depth > 0
    )
