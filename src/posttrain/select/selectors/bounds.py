"""The rows with the greatest bounds, and what bounds all others."""

from dataclasses import dataclass

import numpy as np

from posttrain.select.selectors.closeness import Floats, Rows

_FIRST = 1024
_OFTEN = 8
_SELDOM = 64


@dataclass(frozen=True)
class Frontier:
    """Rows to look at closely.

    Attributes:
        rows: int64, in order.
        bound: the greatest bound of any other row; minus infinity if there is none that may be taken.
        first: the lowest of the other rows with that bound.
    """

    rows: Rows
    bound: float
    first: int

    def wins(self, value: float, row: int) -> bool:
        """Whether a row of this value comes before all others; the lower of two with the same does."""
        return bool(value > self.bound or (value == self.bound and row < self.first))

    @property
    def alone(self) -> bool:
        """Whether no other row may be taken."""
        return bool(np.isneginf(self.bound))


def frontier(bounds: Floats, size: int) -> Frontier:
    """The ``size`` rows with the greatest of float32 [N] bounds; of equal ones the lower rows."""
    if size >= len(bounds):
        return Frontier(np.arange(len(bounds)), -np.inf, len(bounds))
    least = -np.partition(-bounds, size)[size]
    above, level = np.flatnonzero(bounds > least), np.flatnonzero(bounds == least)
    some = size - len(above)
    return Frontier(np.sort(np.concatenate([above, level[:some]])), float(least), int(level[some]))


class Size:
    """How many rows to look at closely: more when that lasts for few choices, fewer when for many."""

    def __init__(self) -> None:
        self._size, self._chosen = _FIRST, -_OFTEN

    def next(self, chosen: int) -> int:
        """The size from now on, when so many rows are chosen."""
        lasted = chosen - self._chosen
        self._chosen = chosen
        if lasted < _OFTEN:
            self._size *= 2
        elif lasted > _SELDOM and self._size > _FIRST:
            self._size //= 2
        return self._size
