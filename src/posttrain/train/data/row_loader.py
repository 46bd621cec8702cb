"""Packed rows in NumPy, for trainers of causal language models other than ours."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import numpy as np

from posttrain.train.data.batch_sampler import StepPosition
from posttrain.train.data.loader import DataLoader
from posttrain.train.data.token_set import Tokens, TokenSet

IGNORE_INDEX = -100
"""The label of a token that no loss is taken on, as PyTorch's cross entropy has it."""


@dataclass(frozen=True, eq=False)
class PackedRows:
    """R rows with T tokens together, without padding.

    Args:
        ids: int32 [T].
        labels: int32 [T], the id where a token is supervised and `IGNORE_INDEX` elsewhere; not shifted.
        positions: int32 [T], counted from the beginning of each sequence.
        segments: int32 [T], number of the sequence in its row, from 0: attention stays within one.
        starts: int64 [R + 1], where each row begins.
    """

    ids: np.ndarray
    labels: np.ndarray
    positions: np.ndarray
    segments: np.ndarray
    starts: np.ndarray

    def __len__(self) -> int:
        return len(self.starts) - 1

    def __iter__(self) -> Iterator[dict[str, np.ndarray]]:
        """Yields each row's ids, labels, positions and segments by name, as views."""
        named = {"ids": self.ids, "labels": self.labels, "positions": self.positions, "segments": self.segments}
        for first, last in pairwise(self.starts.tolist()):
            yield {name: values[first:last] for name, values in named.items()}


@dataclass(frozen=True, eq=False)
class RowBatch:
    """The packed rows of one step.

    Args:
        step: its number, from 0.
        epoch: finished passes over the data.
        rows: rows of its units, in their order.
        packed: their tokens.
    """

    step: int
    epoch: int
    rows: list[int]
    packed: PackedRows


class RowLoader(DataLoader[TokenSet, RowBatch]):
    """Loads each step as packed rows."""

    def _make_item(self, position: StepPosition, step: int, rows: list[int], budget: int) -> RowBatch:
        return RowBatch(step, position.epoch, rows, pack_rows(self._units.take(rows), budget))


def row_boundaries(lengths: np.ndarray, budget: int) -> np.ndarray:
    """int64 [R + 1]: the first unit of each row, and the number of units.

    Units keep their order; one that does not fit goes into the next row, and one longer than a row has its own, as in
    `posttrain.models.packing.micro_batches`.

    Args:
        lengths: int64 [U], tokens of each unit.
        budget: largest number of tokens of a row.
    """
    ends = np.cumsum(lengths)
    after = np.searchsorted(ends, ends - lengths + budget, side="right")
    following = np.maximum(after, np.arange(1, len(lengths) + 1)).tolist()
    boundaries = [0]
    while boundaries[-1] < len(following):
        boundaries.append(following[boundaries[-1]])
    return np.array(boundaries, np.int64)


def pack_rows(tokens: Tokens, budget: int) -> PackedRows:
    """Packs units into rows of at most ``budget`` tokens."""
    boundaries = row_boundaries(tokens.unit_lengths, budget)
    ends = np.concatenate([[0], np.cumsum(tokens.lengths)]).astype(np.int64)
    first = np.concatenate([[0], np.cumsum(tokens.sequences)])[boundaries]  # sequence of each row
    numbers = np.arange(len(tokens.lengths), dtype=np.int32)
    numbers -= np.repeat(first[:-1].astype(np.int32), np.diff(first))
    positions = np.repeat(ends[:-1].astype(np.int32), tokens.lengths)
    np.subtract(_arange(len(positions).bit_length())[: len(positions)], positions, out=positions)
    labels = tokens.ids - np.int32(IGNORE_INDEX)  # arithmetic is faster than np.where here
    labels *= tokens.supervised.view(np.int8)
    labels += np.int32(IGNORE_INDEX)
    return PackedRows(tokens.ids, labels, positions, np.repeat(numbers, tokens.lengths), ends[first])


@lru_cache(maxsize=1)
def _arange(bits: int) -> np.ndarray:
    """int32 [2^bits]: 0, 1, and so on."""
    # Cached: steps are about as long as each other, and counting takes as long as packing.
    numbers = np.arange(2**bits, dtype=np.int32)
    numbers.flags.writeable = False
    return numbers
