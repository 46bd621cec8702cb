"""Samples the rows whose ids have the smallest hashes: the same choice in whatever order and tables records come."""

from collections.abc import Iterable
from operator import itemgetter
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt
import xxhash

Row = TypeVar("Row")


def id_hashes(ids: Iterable[str], seed: int) -> npt.NDArray[np.uint64]:
    """Hashes each id with XXH3: uint64 [N]."""
    return np.array([xxhash.xxh3_64_intdigest(id.encode(), seed) for id in ids], dtype=np.uint64)


class BottomKSample(Generic[Row]):
    """Keeps the ``size`` rows with the smallest hashes (a bottom-k sample: uniform, without replacement)."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._rows: list[tuple[int, str, Row]] = []
        self._limit = np.uint64(2**64 - 1)

    def wanted(self, hashes: npt.NDArray[np.uint64]) -> npt.NDArray[np.int64]:
        """Rows int64 [M] of uint64 [N] that may still belong to the sample."""
        # At the limit too: of equal hashes the id decides.
        return np.flatnonzero(hashes <= self._limit)

    def add(self, hash: int, id: str, row: Row) -> None:
        self._rows.append((hash, id, row))
        # Sorting only when the list has doubled keeps the cost of a row constant on average.
        if len(self._rows) >= 2 * self.size + 64:
            self._cut()

    def rows(self) -> list[Row]:
        """Returns the sample by rising hash; equal ids in order of arrival."""
        self._cut()
        return [row for _, _, row in self._rows]

    def _cut(self) -> None:
        self._rows.sort(key=itemgetter(0, 1))
        del self._rows[self.size :]
        if self.size and len(self._rows) == self.size:
            # Rows above the greatest kept hash are skipped before their texts are read.
            self._limit = np.uint64(self._rows[-1][0])
