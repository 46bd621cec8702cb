"""A tokenised training set, read where it lies on the disk."""

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

import numpy as np
import pyarrow as pa

from posttrain.models.chat import Encoded
from posttrain.store.artifacts import MANIFEST, read_manifest

if TYPE_CHECKING:  # torch comes with it
    from posttrain.models.packing import Unit

IDS, SUPERVISED, OFFSETS, UNITS, RECORDS = "ids", "supervised", "offsets", "units", "records.arrow"
DTYPES = {IDS: "<i4", SUPERVISED: "|b1", OFFSETS: "<i8", UNITS: "<i8"}
"""Each file is one flat array: ids [T] and supervised [T] of all sequences one after another, offsets [S + 1] of the
sequences in them, units [U + 1] of the records' sequences in those."""


class TokenSet(Sequence["Unit"]):
    """The units of a training set; only those that are asked for are read from the disk.

    Args:
        folder: of a set that `tokenise` made.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.meta: dict[str, Any] = read_manifest((folder / MANIFEST).read_bytes()).meta
        self._ids, self._supervised, self._offsets, self._units = (_mapped(folder, name) for name in DTYPES)
        with pa.memory_map(str(folder / RECORDS)) as file:
            self._records = pa.ipc.open_file(file).read_all()

    def __len__(self) -> int:
        return len(self._units) - 1

    @overload
    def __getitem__(self, place: int) -> "Unit": ...
    @overload
    def __getitem__(self, place: slice) -> Sequence["Unit"]: ...
    def __getitem__(self, place: int | slice) -> "Unit | Sequence[Unit]":
        if isinstance(place, slice):
            return [self[one] for one in range(len(self))[place]]
        row = range(len(self))[place]  # negative places, and an IndexError where there is none
        return [self._sequence(number) for number in range(int(self._units[row]), int(self._units[row + 1]))]

    def _sequence(self, number: int) -> Encoded:
        tokens = slice(int(self._offsets[number]), int(self._offsets[number + 1]))
        return Encoded(self._ids[tokens].tolist(), self._supervised[tokens].tolist())

    @cached_property
    def sequence_lengths(self) -> np.ndarray:
        """int64 [S]: tokens of each sequence, in the units' order."""
        return np.diff(self._offsets)

    @cached_property
    def longest(self) -> np.ndarray:
        """int64 [U]: tokens of each unit's longest sequence."""
        return np.maximum.reduceat(self.sequence_lengths, self._units[:-1])

    @property
    def largest_id(self) -> int:
        """The largest token id."""
        return int(self.meta["largest_id"])

    @cached_property
    def record_ids(self) -> list[str]:
        """The records' ids, a unit each."""
        return list(self._records["id"].to_pylist())

    @cached_property
    def cut(self) -> list[str]:
        """Ids of the records that were longer than the limit."""
        return list(self._records.filter(self._records["cut"])["id"].to_pylist())

    @cached_property
    def targets(self) -> np.ndarray:
        """int32 [U]: classes, or 1 for a desirable and 0 for an undesirable answer; -1 where there is none."""
        return np.asarray(self._records["target"])

    @cached_property
    def margins(self) -> np.ndarray:
        """float32 [U]: how much better chosen answers are; NaN where the record's margin is no number."""
        return np.asarray(self._records["margin"])


def longest(units: Sequence["Unit"]) -> np.ndarray:
    """int64 [U]: tokens of each unit's longest sequence; counted only where the units do not have it as ``longest``."""
    known: np.ndarray | None = getattr(units, "longest", None)
    return counted(units) if known is None else known


def counted(units: Sequence["Unit"]) -> np.ndarray:
    """What `longest` gives, by looking at every unit."""
    return np.array([max(len(sequence.ids) for sequence in unit) for unit in units], np.int64)


def _mapped(folder: Path, name: str) -> np.ndarray:
    path, dtype = folder / name, DTYPES[name]
    if path.stat().st_size == 0:  # nothing to map
        return np.empty(0, dtype)
    return np.memmap(path, dtype, "r")
