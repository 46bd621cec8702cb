"""A tokenised training set: shards on disk, memory-mapped."""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast, overload

import numpy as np
import pyarrow as pa

from posttrain.models.chat import TokenizedExample
from posttrain.store.artifacts import MANIFEST, parse_manifest

if TYPE_CHECKING:
    from posttrain.models.packing import Unit

IDS, SUPERVISED, OFFSETS, UNITS, RECORDS = "ids", "supervised", "offsets", "units", "records.arrow"

DTYPES = {IDS: "<i4", SUPERVISED: "|b1", OFFSETS: "<i8", UNITS: "<i8"}
"""Each file is one flat array: ids [T] and supervised [T] of all sequences one after another, offsets [S + 1] of the
sequences in them, units [U + 1] of the records' sequences in those."""


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
        return segment_sums(self.lengths, self.sequences)

    def views(self) -> "list[Unit]":
        """Returns the units, whose sequences' ids and supervised are views of the arrays."""
        ends = np.cumsum(self.lengths).tolist()
        parts = [
            TokenizedExample(cast("list[int]", self.ids[first:last]), cast("list[bool]", self.supervised[first:last]))
            for first, last in zip([0, *ends], ends, strict=False)
        ]
        last = np.cumsum(self.sequences).tolist()
        return [parts[first:last] for first, last in zip([0, *last], last, strict=False)]


class Units(Sequence["Unit"]):
    """A sequence of units that are read on access."""

    @abstractmethod
    def unit(self, row: int) -> "Unit":
        """Reads the unit of an existing row."""

    @overload
    def __getitem__(self, index: int) -> "Unit": ...
    @overload
    def __getitem__(self, index: slice) -> Sequence["Unit"]: ...
    def __getitem__(self, index: int | slice) -> "Unit | Sequence[Unit]":
        rows = range(len(self))[index]  # handles negative indices, and raises the IndexError
        return self.unit(rows) if isinstance(rows, int) else [self.unit(row) for row in rows]


class TokenSet(Units):
    """The units of a training set, read from disk on access.

    Args:
        folder: folder of a set that `tokenise` made.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        manifest = parse_manifest((folder / MANIFEST).read_bytes())
        self.id = manifest.id
        """Digest of the set's whole content."""
        self.meta: dict[str, Any] = manifest.meta
        self.shards = [TokenShard(folder / shard_name(number)) for number in range(self.meta["shards"])]
        self._starts = np.cumsum([0, *map(len, self.shards)])

    def __len__(self) -> int:
        return int(self._starts[-1])

    def unit(self, row: int) -> "Unit":
        """Reads the unit of a row."""
        # Shards differ in length, so the row's is searched for rather than computed.
        shard = int(np.searchsorted(self._starts, row, side="right")) - 1
        return self.shards[shard].unit(row - int(self._starts[shard]))

    def take(self, rows: Sequence[int] | np.ndarray) -> Tokens:
        """Copies the tokens of some units, in the given order.

        Raises:
            IndexError: there is no such unit.
        """
        indices = np.asarray(rows, np.int64)
        if len(indices) and not 0 <= indices.min() <= indices.max() < len(self):
            raise IndexError(f"the set has {len(self)} units")
        shards = (np.searchsorted(self._starts, indices, side="right") - 1).tolist()
        # Offsets of all units are held in memory: 8 bytes each, where reading them would cost a page fault a record.
        starts = self._tokens[indices]
        spans = list(map(slice, starts.tolist(), (starts + self.unit_lengths[indices]).tolist()))
        counts = self._counts[indices]
        return Tokens(
            gather([shard.ids for shard in self.shards], shards, spans),
            gather([shard.supervised for shard in self.shards], shards, spans),
            self.sequence_lengths[concat_ranges(self._sequences[indices], counts)],
            counts,
        )

    @cached_property
    def sequence_lengths(self) -> np.ndarray:
        """int64 [S]: tokens of each sequence, in the units' order."""
        return np.concatenate([shard.sequence_lengths for shard in self.shards])

    @cached_property
    def unit_lengths(self) -> np.ndarray:
        """int64 [U]: tokens of each unit."""
        return np.concatenate([shard.unit_lengths for shard in self.shards])

    @cached_property
    def longest(self) -> np.ndarray:
        """int64 [U]: tokens of each unit's longest sequence."""
        return np.concatenate([np.maximum.reduceat(shard.sequence_lengths, shard.units[:-1]) for shard in self.shards])

    @cached_property
    def _tokens(self) -> np.ndarray:
        """int64 [U]: where each unit's tokens begin in its shard."""
        return np.concatenate([shard.starts for shard in self.shards])

    @cached_property
    def _counts(self) -> np.ndarray:
        """int64 [U]: sequences of each unit."""
        return np.concatenate([shard.sequences for shard in self.shards])

    @cached_property
    def _sequences(self) -> np.ndarray:
        """int64 [U]: each unit's first sequence, among those of the set."""
        starts: np.ndarray = np.cumsum(self._counts) - self._counts
        return starts

    @property
    def largest_id(self) -> int:
        """The largest token id."""
        return int(self.meta["largest_id"])

    @cached_property
    def record_ids(self) -> list[str]:
        """The records' ids, a unit each."""
        return [id for shard in self.shards for id in shard.records["id"].to_pylist()]

    @cached_property
    def cut(self) -> list[str]:
        """Ids of the records that were longer than the limit."""
        return [id for shard in self.shards for id in shard.records.filter(shard.records["cut"])["id"].to_pylist()]

    @cached_property
    def targets(self) -> np.ndarray:
        """int32 [U]: classes, or 1 for a desirable and 0 for an undesirable answer; -1 where there is none."""
        return np.concatenate([np.asarray(shard.records["target"]) for shard in self.shards])


class TokenShard(Units):
    """Whole records of a set; only those that are used are read from the disk, each in constant time.

    Args:
        folder: folder of a shard, which needs no other one.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ids, self.supervised, self.offsets, self.units = (_memory_map(folder, name) for name in DTYPES)
        # Mapped as well: ids of millions of records are read only where a report needs them.
        with pa.memory_map(str(folder / RECORDS)) as file:
            self.records = pa.ipc.open_file(file).read_all()

    def __len__(self) -> int:
        return len(self.units) - 1

    def unit(self, row: int) -> "Unit":
        """Reads the unit of a row."""
        return [self._sequence(number) for number in range(int(self.units[row]), int(self.units[row + 1]))]

    def _sequence(self, number: int) -> TokenizedExample:
        tokens = slice(int(self.offsets[number]), int(self.offsets[number + 1]))
        # Lists: a dozen tokens are faster to handle in Python than as an array.
        return TokenizedExample(self.ids[tokens].tolist(), self.supervised[tokens].tolist())

    @cached_property
    def sequence_lengths(self) -> np.ndarray:
        """int64 [S]: tokens of each sequence, in the units' order."""
        return np.diff(self.offsets)

    @cached_property
    def unit_lengths(self) -> np.ndarray:
        """int64 [U]: tokens of each unit."""
        return segment_sums(self.sequence_lengths, self.sequences)

    @property
    def sequences(self) -> np.ndarray:
        """int64 [U]: sequences of each unit."""
        return np.diff(self.units)

    @property
    def starts(self) -> np.ndarray:
        """int64 [U]: where each unit's tokens begin."""
        starts: np.ndarray = self.offsets[self.units[:-1]]
        return starts


def longest_lengths(units: Sequence["Unit"]) -> np.ndarray:
    """int64 [U]: tokens of each unit's longest sequence, counted only if the units have no ``longest``."""
    lengths: np.ndarray | None = getattr(units, "longest", None)
    return count_longest(units) if lengths is None else lengths


def count_longest(units: Sequence["Unit"]) -> np.ndarray:
    """int64 [U]: tokens of each unit's longest sequence, by reading every unit."""
    return np.array([max(len(sequence.ids) for sequence in unit) for unit in units], np.int64)


def unit_lengths(units: Sequence["Unit"]) -> np.ndarray:
    """int64 [U]: tokens of each unit, counted only if the units have no ``unit_lengths``."""
    lengths: np.ndarray | None = getattr(units, "unit_lengths", None)
    if lengths is None:
        return np.array([sum(len(sequence.ids) for sequence in unit) for unit in units], np.int64)
    return lengths


def count_supervised(sequence: TokenizedExample) -> int:
    """Counts the tokens that a loss is taken on."""
    # Nothing predicts a first token.
    return sum(sequence.supervised[1:])


def shard_name(number: int) -> str:
    """Returns the name of a shard's folder in its set."""
    return f"shard-{number:05d}"


def _memory_map(folder: Path, name: str) -> np.ndarray:
    path, dtype = folder / name, DTYPES[name]
    if path.stat().st_size == 0:  # an empty file cannot be mapped
        return np.empty(0, dtype)
    return np.asarray(np.memmap(path, dtype, "r"))  # a memmap takes longer to index


def gather(sources: Sequence[np.ndarray], numbers: Sequence[int], spans: Sequence[slice]) -> np.ndarray:
    """Concatenates spans of flat arrays of one dtype.

    Args:
        sources: the arrays.
        numbers: index of each span's array.
        spans: each span in its array.
    """
    # Joining buffers copies many blocks of different lengths at once; NumPy needs a call for each, or copies element by
    # element, which takes twice as long.
    views = [source.data for source in sources]
    joined = bytearray().join([views[number][span] for number, span in zip(numbers, spans, strict=True)])
    return np.frombuffer(joined, sources[0].dtype)


def segment_sums(values: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Sums the first ``counts[0]`` values, the ``counts[1]`` after them, and so on."""
    if len(values) == len(counts):  # no unit is empty, so each has one value
        return values
    return np.add.reduceat(values, np.cumsum(counts) - counts) if len(counts) else np.zeros(0, values.dtype)


def concat_ranges(starts: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """int64: ``counts[0]`` numbers from ``starts[0]`` on, ``counts[1]`` from ``starts[1]`` on, and so on."""
    # Most sets have one sequence a unit, and then there is nothing to compute.
    if (counts == 1).all():
        return starts
    return np.repeat(starts - np.cumsum(counts) + counts, counts) + np.arange(counts.sum())
