"""What a utility is, and what makes one cheap along a growing set."""

from collections.abc import Callable
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from posttrain.store.errors import UserError

Rows = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

Utility = Callable[[Rows], float]
"""The score of a model trained on the rows given, int64 [n] distinct in any order, n = 0 included; higher is better.

One set must always score the same. Two attributes may help: ``players``, an integer, the number of rows, and ``key``, a
string that tells the utility's data and settings and lets work on it be resumed.
"""


class Growing(Protocol):
    """A model that learns one row after the other; it begins without any."""

    def add(self, row: int) -> None:
        """Learn from one more row."""

    def score(self) -> float:
        """The utility of the rows learnt so far."""


@runtime_checkable
class Incremental(Protocol):
    """A utility that follows a growing set at less than a training a row."""

    def __call__(self, rows: Rows, /) -> float: ...

    def start(self) -> Growing:
        """A model of no rows."""


class _Retrained:
    """Any utility as one that grows: each score is a training of its own."""

    def __init__(self, utility: Utility) -> None:
        self._utility = utility
        self._rows: list[int] = []

    def add(self, row: int) -> None:
        self._rows.append(row)

    def score(self) -> float:
        return float(self._utility(np.array(self._rows, dtype=np.int64)))


def start(utility: Utility) -> Growing:
    """A model of no rows: the utility's own where it is incremental, else one that is trained anew for each score."""
    return utility.start() if isinstance(utility, Incremental) else _Retrained(utility)


def utility_key(utility: Utility) -> str:
    """The utility's ``key``.

    Raises:
        UserError: it has none.
    """
    key = getattr(utility, "key", None)
    if not isinstance(key, str):
        raise UserError("the utility has no `key` that tells its data", fix="set it to a string, or give no folder")
    return key
