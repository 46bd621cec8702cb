"""One shard of a tokenised training set, read where it lies on the disk."""

from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from posttrain.models.chat import Encoded
from posttrain.train.tokens.flat import summed
from posttrain.train.tokens.units import Units

if TYPE_CHECKING:  # torch comes with it
    from posttrain.models.packing import Unit

IDS, SUPERVISED, OFFSETS, UNITS, RECORDS = "ids", "supervised", "offsets", "units", "records.arrow"
DTYPES = {IDS: "<i4", SUPERVISED: "|b1", OFFSETS: "<i8", UNITS: "<i8"}
"""Each file is one flat array: ids [T] and supervised [T] of all sequences one after another, offsets [S + 1] of the
sequences in them, units [U + 1] of the records' sequences in those."""


def shard_name(number: int) -> str:
    """The folder of a shard in its set."""
    return f"shard-{number:05d}"


class TokenShard(Units):
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

    def unit(self, row: int) -> "Unit":
        """The unit of a row from 0 on."""
        return [self._sequence(number) for number in range(int(self.units[row]), int(self.units[row + 1]))]

    def _sequence(self, number: int) -> Encoded:
        tokens = slice(int(self.offsets[number]), int(self.offsets[number + 1]))
        return Encoded(self.ids[tokens].tolist(), self.supervised[tokens].tolist())

    @cached_property
    def sequence_lengths(self) -> np.ndarray:
        """int64 [S]: tokens of each sequence, in the units' order."""
        return np.diff(self.offsets)

    @cached_property
    def unit_lengths(self) -> np.ndarray:
        """int64 [U]: tokens of each unit."""
        return summed(self.sequence_lengths, self.sequences)

    @property
    def sequences(self) -> np.ndarray:
        """int64 [U]: sequences of each unit."""
        return np.diff(self.units)

    @property
    def starts(self) -> np.ndarray:
        """int64 [U]: where each unit's tokens begin."""
        found: np.ndarray = self.offsets[self.units[:-1]]
        return found


def _mapped(folder: Path, name: str) -> np.ndarray:
    path, dtype = folder / name, DTYPES[name]
    if path.stat().st_size == 0:  # nothing to map
        return np.empty(0, dtype)
    return np.asarray(np.memmap(path, dtype, "r"))  # a memmap takes longer to index
