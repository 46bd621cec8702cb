"""One shard of a tokenised training set, read where it lies on the disk."""

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, overload

import numpy as np
import pyarrow as pa

from posttrain.models.chat import Encoded
from posttrain.train.tokens.flat import Store, Tokens, summed

if TYPE_CHECKING:  # torch comes with it
    from posttrain.models.packing import Unit

IDS, SUPERVISED, OFFSETS, UNITS, RECORDS = "ids", "supervised", "offsets", "units", "records.arrow"
DTYPES = {IDS: "<i4", SUPERVISED: "|b1", OFFSETS: "<i8", UNITS: "<i8"}
"""Each file is one flat array: ids [T] and supervised [T] of all sequences one after another, offsets [S + 1] of the
sequences in them, units [U + 1] of the records' sequences in those."""


def shard_name(number: int) -> str:
    """The folder of a shard in its set."""
    return f"shard-{number:05d}"


class TokenShard(Sequence["Unit"]):
    """Whole records of a set; only those that are asked for are read from the disk, each in constant time.

    Args:
        folder: of a shard, which needs no other one.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ids, self.supervised, self.offsets, self.units = (_mapped(folder, name) for name in DTYPES)
        with pa.memory_map(str(folder / RECORDS)) as file:
            self.records = pa.ipc.open_file(file).read_all()

    def __len__(self) -> int:
        return len(self.units) - 1

    @overload
    def __getitem__(self, place: int) -> "Unit": ...
    @overload
    def __getitem__(self, place: slice) -> Sequence["Unit"]: ...
    def __getitem__(self, place: int | slice) -> "Unit | Sequence[Unit]":
        if isinstance(place, slice):
            return [self[one] for one in range(len(self))[place]]
        row = range(len(self))[place]  # negative places, and an IndexError where there is none
        return [self._sequence(number) for number in range(int(self.units[row]), int(self.units[row + 1]))]

    def _sequence(self, number: int) -> Encoded:
        tokens = slice(int(self.offsets[number]), int(self.offsets[number + 1]))
        return Encoded(self.ids[tokens].tolist(), self.supervised[tokens].tolist())

    @cached_property
    def sequence_lengths(self) -> np.ndarray:
        """int64 [S]: tokens of each sequence, in the units' order."""
        return np.diff(self.offsets)

    def take(self, rows: np.ndarray) -> Tokens:
        """The tokens of some units, int64 [U], in the order in which they are asked for."""
        first = self._units[rows]
        counts = self._units[rows + 1] - first
        numbers = first
        if not (counts == 1).all():
            numbers = np.repeat(first - np.cumsum(counts) + counts, counts) + np.arange(counts.sum())
        return Tokens(*self._store.take(rows), self.sequence_lengths[numbers], counts)

    @cached_property
    def unit_lengths(self) -> np.ndarray:
        """int64 [U]: tokens of each unit."""
        return summed(self.sequence_lengths, np.diff(self._units))

    @cached_property
    def _units(self) -> np.ndarray:
        return np.asarray(self.units)  # a memmap takes longer to index

    @cached_property
    def _store(self) -> Store:
        return Store(self.ids, self.supervised, np.asarray(self.offsets)[self._units])


def _mapped(folder: Path, name: str) -> np.ndarray:
    path, dtype = folder / name, DTYPES[name]
    if path.stat().st_size == 0:  # nothing to map
        return np.empty(0, dtype)
    return np.memmap(path, dtype, "r")
