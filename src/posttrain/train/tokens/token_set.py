"""A tokenised training set, in shards that are read where they lie on the disk."""

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from posttrain.store.artifacts import MANIFEST, damaged, read_manifest
from posttrain.store.hashing import file_digest
from posttrain.train.tokens.flat import Tokens, gathered, ranges
from posttrain.train.tokens.token_shard import TokenShard, shard_name
from posttrain.train.tokens.units import Units

if TYPE_CHECKING:  # torch comes with it
    from posttrain.models.packing import Unit


class TokenSet(Units):
    """The units of a training set; only those that are asked for are read from the disk.

    Args:
        folder: of a set that `tokenise` made.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        manifest = read_manifest((folder / MANIFEST).read_bytes())
        self.id = manifest.id
        """Made of all that the set holds."""
        self.meta: dict[str, Any] = manifest.meta
        self.shards = [TokenShard(folder / shard_name(number)) for number in range(self.meta["shards"])]
        self._starts = np.cumsum([0, *map(len, self.shards)])

    def __len__(self) -> int:
        return int(self._starts[-1])

    def unit(self, row: int) -> "Unit":
        """The unit of a row from 0 on."""
        shard = int(np.searchsorted(self._starts, row, side="right")) - 1
        return self.shards[shard].unit(row - int(self._starts[shard]))

    def take(self, rows: Sequence[int] | np.ndarray) -> Tokens:
        """The tokens of some units, in the order in which they are asked for, each copied once.

        Raises:
            IndexError: there is no such unit.
        """
        wanted = np.asarray(rows, np.int64)
        if len(wanted) and not 0 <= wanted.min() <= wanted.max() < len(self):
            raise IndexError(f"the set has {len(self)} units")
        shards = (np.searchsorted(self._starts, wanted, side="right") - 1).tolist()
        starts = self._tokens[wanted]
        spans = list(map(slice, starts.tolist(), (starts + self.unit_lengths[wanted]).tolist()))
        counts = self._counts[wanted]
        return Tokens(
            gathered([shard.ids for shard in self.shards], shards, spans),
            gathered([shard.supervised for shard in self.shards], shards, spans),
            self.sequence_lengths[ranges(self._sequences[wanted], counts)],
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
        return np.concatenate([np.maximum.reduceat(one.sequence_lengths, one.units[:-1]) for one in self.shards])

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
        found: np.ndarray = np.cumsum(self._counts) - self._counts
        return found

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

    @cached_property
    def margins(self) -> np.ndarray:
        """float32 [U]: how much better chosen answers are; NaN where the record's margin is no number."""
        return np.concatenate([np.asarray(shard.records["margin"]) for shard in self.shards])


def open_shard(folder: Path, number: int) -> TokenShard:
    """One shard of a set, with its checksums verified; the other shards are not read and need not be there.

    Args:
        folder: of the set.

    Raises:
        IndexError: the set has no such shard.
        DamagedArtifact: one of its files is missing or differs from its checksum.
    """
    manifest = read_manifest((folder / MANIFEST).read_bytes())
    if not 0 <= number < manifest.meta["shards"]:
        raise IndexError(f"the set has {manifest.meta['shards']} shards")
    own = {name: entry for name, entry in manifest.files.items() if name.startswith(f"{shard_name(number)}/")}
    if problems := [
        f"{name} {'differs from its checksum' if (folder / name).is_file() else 'is missing'}"
        for name, entry in own.items()
        if not (folder / name).is_file() or file_digest(folder / name) != entry.sha256
    ]:
        raise damaged(manifest.id, problems)
    return TokenShard(folder / shard_name(number))


def longest(units: Sequence["Unit"]) -> np.ndarray:
    """int64 [U]: tokens of each unit's longest sequence; counted only where the units do not have it as ``longest``."""
    known: np.ndarray | None = getattr(units, "longest", None)
    return counted(units) if known is None else known


def counted(units: Sequence["Unit"]) -> np.ndarray:
    """What `longest` gives, by looking at every unit."""
    return np.array([max(len(sequence.ids) for sequence in unit) for unit in units], np.int64)


def unit_lengths(units: Sequence["Unit"]) -> np.ndarray:
    """int64 [U]: tokens of each unit; counted only where the units do not have it as ``unit_lengths``."""
    known: np.ndarray | None = getattr(units, "unit_lengths", None)
    if known is None:
        return np.array([sum(len(sequence.ids) for sequence in unit) for unit in units], np.int64)
    return known
