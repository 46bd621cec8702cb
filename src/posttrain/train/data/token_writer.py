"""Writes a tokenised training set to disk, shard by shard."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
import pyarrow as pa

from posttrain.store.files import disk_errors
from posttrain.train.data.token_set import DTYPES, IDS, OFFSETS, RECORDS, SUPERVISED, UNITS, Tokens, shard_name

SHARD_TOKENS = 2**28
"""Tokens of a shard: 1 GiB of ids."""


@dataclass(frozen=True, eq=False)
class Block(Tokens):
    """The tokens of U records, and their targets.

    Args:
        cut: bool [U].
        targets: int32 [U], see `EncodedExample`.
    """

    cut: np.ndarray
    targets: np.ndarray


def write_shards(blocks: Iterable[Block], records: pa.Table, folder: Path, shard_tokens: int) -> dict[str, int]:
    """Writes shards of whole records, as many as fit into ``shard_tokens``, or one.

    The bytes do not depend on how the records are cut into blocks.

    Args:
        blocks: all records, in their order.
        records: the same records, with their ids.

    Returns:
        The manifest's fields: ``shards``, ``sequences``, ``tokens``, ``supervised_tokens``,
        ``largest_id``.
    """
    counts = {"shards": 0, "sequences": 0, "tokens": 0, "supervised_tokens": 0, "largest_id": 0}
    written, shard = 0, None
    try:
        for block in blocks:
            counts["sequences"] += len(block.lengths)
            counts["tokens"] += len(block.ids)
            counts["supervised_tokens"] += int(block.supervised.sum())
            counts["largest_id"] = max(counts["largest_id"], int(block.ids.max(initial=0)))
            ends = np.cumsum(block.unit_lengths)
            first, count = 0, len(block.sequences)
            while first < count:
                if shard is None:
                    shard = _ShardWriter(folder / shard_name(counts["shards"]))
                    counts["shards"] += 1
                # Cut at records only, so that a shard can be read by itself.
                before = ends[first - 1] if first else 0
                last = int(np.searchsorted(ends, before + shard_tokens - shard.tokens, side="right"))
                # Full: the record begins the next shard.
                if last <= first and shard.tokens:
                    written += shard.finish(records.slice(written))
                    shard = None
                    continue
                # A record longer than a shard has one of its own.
                last = max(last, first + 1)
                shard.add(_slice_block(block, first, last))
                first = last
        if shard is not None or not counts["shards"]:
            shard = shard or _ShardWriter(folder / shard_name(0))
            shard.finish(records.slice(written))
            counts["shards"] = max(1, counts["shards"])
    finally:
        if shard is not None:
            shard.close()
    return counts


class _ShardWriter:
    """Writes the files of one shard."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.tokens = 0
        self._blocks: list[Block] = []
        with disk_errors(folder):
            folder.mkdir()
            self._ids, self._supervised = (folder / IDS).open("wb"), (folder / SUPERVISED).open("wb")

    def add(self, block: Block) -> None:
        with disk_errors(self._folder):
            _write_array(self._ids, block.ids, IDS)
            _write_array(self._supervised, block.supervised, SUPERVISED)
        self.tokens += len(block.ids)
        nothing = np.empty(0, np.int32)
        self._blocks.append(Block(nothing, nothing, block.lengths, block.sequences, block.cut, block.targets))

    def close(self) -> None:
        self._ids.close()
        self._supervised.close()

    def finish(self, records: pa.Table) -> int:
        """Writes the remaining files; ``records`` begins with the shard's. Return their number."""
        self.close()
        values = {
            name: np.concatenate([np.empty(0, dtype), *(getattr(block, name) for block in self._blocks)])
            for name, dtype in (("lengths", "i8"), ("sequences", "i8"), ("cut", "?"), ("targets", "i4"))
        }
        count = len(values["sequences"])
        columns = {
            "id": records["id"].slice(0, count).combine_chunks(),
            "cut": values["cut"],
            "target": values["targets"],
        }
        table = pa.table(columns)
        with disk_errors(self._folder):
            for counts, name in ((values["lengths"], OFFSETS), (values["sequences"], UNITS)):
                with (self._folder / name).open("wb") as file:
                    _write_array(file, np.cumsum(np.concatenate([[0], counts])), name)
            with pa.OSFile(str(self._folder / RECORDS), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
                writer.write_table(table)
        return count


def _slice_block(block: Block, first: int, last: int) -> Block:
    """Slices the units from ``first`` to before ``last``."""
    if (first, last) == (0, len(block.sequences)):
        return block
    sequences = np.concatenate([[0], np.cumsum(block.sequences)])
    span = slice(int(sequences[first]), int(sequences[last]))
    offsets = np.concatenate([[0], np.cumsum(block.lengths)])
    tokens = slice(int(offsets[span.start]), int(offsets[span.stop]))
    own = slice(first, last)
    return Block(
        block.ids[tokens],
        block.supervised[tokens],
        block.lengths[span],
        block.sequences[own],
        block.cut[own],
        block.targets[own],
    )


def _write_array(file: BinaryIO, values: np.ndarray, name: str) -> None:
    file.write(np.ascontiguousarray(values, DTYPES[name]).data)
