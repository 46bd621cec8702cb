"""Greedy choice of what is worth much and lies far from all that is chosen: exact, and lazy about the rest.

A row's closeness to the nearest chosen row only grows while rows are chosen, so that what is known of it bounds it. The
rows that may be next are kept up to date, and every other only when its bound says that its turn may have come, with
all rows chosen since at once: a product of matrices, where a row at a time would wait for memory.
"""

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from posttrain.select.selectors.bounds import Frontier, Size, frontier
from posttrain.select.selectors.closeness import Closeness, Floats, Rows, blocks, closest

Groups = npt.NDArray[np.int64]


def farthest_first(
    closeness: Closeness,
    n: int,
    worth: npt.NDArray[np.floating],
    weight: float,
    before: Rows,
    groups: Groups | None = None,
    quotas: Groups | None = None,
) -> Rows:
    """Take ``n`` times the row with the greatest ``worth - weight * closeness to the nearest chosen row``.

    Args:
        closeness: of N rows.
        n: rows wanted.
        worth: float [N]; minus infinity for a row that may not be taken.
        weight: non-negative.
        before: int64 rows that count as chosen. While there are none, the row worth most is taken.
        groups: int64 [N], the group of each row.
        quotas: int64 [groups], how many rows of each may be taken.

    Returns:
        int64 distinct rows in the order of the choice; fewer than ``n`` if no more may be taken. The lower of two rows
        that are worth the same is taken first.
    """
    worth = np.array(worth, np.float32)
    groups = np.zeros(len(worth), np.int64) if groups is None else groups
    left = np.array([n]) if quotas is None else quotas.copy()
    worth[left[groups] <= 0] = -np.inf
    queue = _Queue(closeness, worth, weight, before) if len(before) else None
    chosen: list[int] = []
    while len(chosen) < n:
        row = queue.take() if queue else int(np.argmax(worth))
        if row is None or np.isneginf(worth[row]):
            break
        chosen.append(row)
        worth[row] = -np.inf
        left[groups[row]] -= 1
        if left[groups[row]] == 0:
            worth[groups == groups[row]] = -np.inf
        if queue is None:
            queue = _Queue(closeness, worth, weight, np.array(chosen))
    return np.array(chosen, np.int64)


class _Queue:
    """Rows by their worth, which may become minus infinity meanwhile, and their closeness to the chosen ones."""

    def __init__(self, closeness: Closeness, worth: Floats, weight: float, chosen: Rows) -> None:
        self._closeness, self._worth, self._weight = closeness, worth, np.float32(weight)
        self._chosen = list(chosen)
        self._nearest = closest(closeness, np.arange(len(closeness)), chosen)
        self._seen = np.full(len(closeness), len(chosen))
        self._size = Size()
        self._look_at(frontier(self._values(slice(None)), self._size.next(len(chosen))))

    def take(self) -> int | None:
        """The row to take next, which counts as chosen from now on; None if no row may be taken."""
        while True:
            values = self._worth[self._front.rows] - self._weight * self._front_nearest
            place = int(np.argmax(values)) if len(values) else -1
            if len(values) and self._front.wins(values[place], int(self._front.rows[place])):
                break
            if self._front.alone:
                return None
            self._draw()
        row = int(self._front.rows[place])
        self._chosen.append(row)
        new = self._close_up.between(slice(None), slice(place, place + 1))[:, 0]
        np.maximum(self._front_nearest, new, out=self._front_nearest)
        return row

    def _values(self, rows: Rows | slice) -> Floats:
        values: Floats = self._worth[rows] - self._weight * self._nearest[rows]
        return values

    def _draw(self) -> None:
        """Bring the rows with the greatest bounds up to date, to look at them from now on."""
        self._nearest[self._front.rows], self._seen[self._front.rows] = self._front_nearest, len(self._chosen)
        front = frontier(self._values(slice(None)), self._size.next(len(self._chosen)))
        self._catch_up(front.rows[self._seen[front.rows] < len(self._chosen)])
        self._look_at(front)

    def _catch_up(self, rows: Rows) -> None:
        rows = rows[np.argsort(self._seen[rows], kind="stable")]
        for part in blocks(len(rows)):
            others = np.array(self._chosen[self._seen[rows[part.start]] :])
            found = self._closeness.between(rows[part], others).max(axis=1)
            self._nearest[rows[part]] = np.maximum(self._nearest[rows[part]], found)
        self._seen[rows] = len(self._chosen)

    def _look_at(self, front: Frontier) -> None:
        front = replace(front, rows=front.rows[self._values(front.rows) >= front.bound])  # others cannot be next
        self._front, self._front_nearest = front, self._nearest[front.rows]
        self._close_up = self._closeness.of(front.rows)
