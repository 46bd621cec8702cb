"""Tokens of many sequences in flat arrays, and some of them gathered in another order."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import pyarrow as pa

from posttrain.models.chat import Encoded

if TYPE_CHECKING:  # torch comes with it
    from posttrain.models.packing import Unit


@dataclass(frozen=True, eq=False)
class Tokens:
    """U units of S sequences with T tokens.

    Args:
        ids: int32 [T].
        supervised: bool [T].
        lengths: int64 [S], tokens of each sequence.
        sequences: int64 [U], sequences of each unit.
    """

    ids: np.ndarray
    supervised: np.ndarray
    lengths: np.ndarray
    sequences: np.ndarray

    @property
    def unit_lengths(self) -> np.ndarray:
        """int64 [U]: tokens of each unit."""
        return summed(self.lengths, self.sequences)

    def views(self) -> "list[Unit]":
        """The units, whose sequences' ids and supervised are parts of the arrays and no lists."""
        ends = np.cumsum(self.lengths).tolist()
        parts = [
            Encoded(cast("list[int]", self.ids[first:last]), cast("list[bool]", self.supervised[first:last]))
            for first, last in zip([0, *ends], ends, strict=False)
        ]
        last = np.cumsum(self.sequences).tolist()
        return [parts[first:last] for first, last in zip([0, *last], last, strict=False)]


class Store:
    """Arrays of the tokens of N runs (units), from which runs are gathered in any order.

    pyarrow takes the values of a binary array by a block copy each, several times as fast as NumPy takes elements.

    Args:
        ids: int32 [T].
        supervised: bool [T].
        offsets: int64 [N + 1], where each run begins in them.
    """

    def __init__(self, ids: np.ndarray, supervised: np.ndarray, offsets: np.ndarray) -> None:
        self._ids = _binary(ids, offsets * 4)
        self._supervised = _binary(supervised.view(np.uint8), offsets)

    def take(self, runs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The ids, int32, and which are supervised, bool, of some runs one after another.

        Args:
            runs: int64, their numbers, which are there.
        """
        wanted = pa.array(runs)
        return _values(self._ids, wanted, "<i4"), _values(self._supervised, wanted, "|b1")


def summed(values: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Sums of the first ``counts[0]`` values, of the ``counts[1]`` after them, and so on."""
    if len(values) == len(counts):  # there is no empty unit
        return values
    return np.add.reduceat(values, np.cumsum(counts) - counts) if len(counts) else np.zeros(0, values.dtype)


def _binary(values: np.ndarray, offsets: np.ndarray) -> Any:
    starts = np.ascontiguousarray(offsets, "<i8")
    buffers = [None, pa.py_buffer(starts), pa.py_buffer(values)]
    return pa.LargeBinaryArray.from_buffers(pa.large_binary(), len(starts) - 1, buffers)


def _values(array: Any, wanted: Any, dtype: str) -> np.ndarray:
    if not len(wanted):
        return np.empty(0, dtype)
    _, offsets, values = array.take(wanted).buffers()
    size = np.frombuffer(offsets, "<i8", len(wanted) + 1)[-1]
    return np.frombuffer(values, dtype, size // np.dtype(dtype).itemsize)
