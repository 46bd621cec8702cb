"""Tokens of many sequences in flat arrays, and some of them gathered in another order."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import numpy as np

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


def gathered(sources: Sequence[np.ndarray], numbers: Sequence[int], spans: Sequence[slice]) -> np.ndarray:
    """Parts of some flat arrays of one dtype one after another, each copied once, from where it lies.

    Joining buffers is the one way of Python to copy many blocks of different lengths from anywhere, which NumPy does
    by a call each or element by element; it takes half the time.

    Args:
        sources: the arrays.
        numbers: for each part, which array it is of.
        spans: for each part, where it lies in its array.
    """
    views = [source.data for source in sources]
    joined = bytearray().join([views[number][span] for number, span in zip(numbers, spans, strict=True)])
    return np.frombuffer(joined, sources[0].dtype)


def summed(values: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Sums of the first ``counts[0]`` values, of the ``counts[1]`` after them, and so on."""
    if len(values) == len(counts):  # there is no empty unit
        return values
    return np.add.reduceat(values, np.cumsum(counts) - counts) if len(counts) else np.zeros(0, values.dtype)


def ranges(starts: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """int64: ``counts[0]`` numbers from ``starts[0]`` on, ``counts[1]`` from ``starts[1]`` on, and so on."""
    if (counts == 1).all():
        return starts
    return np.repeat(starts - np.cumsum(counts) + counts, counts) + np.arange(counts.sum())
