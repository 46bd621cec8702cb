"""Micro-batches: sequences one after another in one row, what they share computed once."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from torch import Tensor

from posttrain.models.chat import Encoded
from posttrain.models.row_plan import Piece, Plan, plans

Unit = Sequence[Encoded]
"""What is kept together in a micro-batch: one sequence, or the sequences of a pair, which may share a prompt."""


@dataclass(frozen=True)
class Packed:
    """A micro-batch of N sequences with S supervised tokens, in one row of T tokens.

    Args:
        ids: int64 [1, T].
        positions: int64 [1, T], counted from the beginning of each sequence.
        pieces: how attention is confined.
        predicting: int64 [S], places in the row whose next token is supervised.
        targets: int64 [S], those tokens.
        sequence: int64 [S], which sequence each belongs to.
        sequences: N.
        tokens: tokens of all sequences, what is shared counted for each.
        pairs: of a token of the row and one that it sees, itself included.
        padded: whether the model is to be given padded rows instead, a sequence each.
    """

    ids: Tensor
    positions: Tensor
    pieces: Plan
    predicting: Tensor
    targets: Tensor
    sequence: Tensor
    sequences: int
    tokens: int
    pairs: int
    padded: bool


def micro_batches(units: Iterable[Unit], budget: int) -> Iterator[list[Unit]]:
    """Cut one optimiser step's units, in their order, into micro-batches of at most ``budget`` tokens, or one unit.

    What units share is not taken off: a budget is a promise about memory that holds without it.
    """
    waiting: list[Unit] = []
    filled = 0
    for unit in units:
        tokens = sum(len(sequence.ids) for sequence in unit)
        if waiting and filled + tokens > budget:
            yield waiting
            waiting, filled = [], 0
        waiting.append(unit)
        filled += tokens
    if waiting:
        yield waiting


def pack(units: Sequence[Unit], device: torch.device | str = "cpu", *, padded: bool = False) -> Packed:
    """Put the units' sequences into one row.

    The beginning that all sequences share (system message, template) stands in it once, and so does the prompt that
    the sequences of a unit share, unless they are ``padded`` for a model that cannot be given one row. A sequence's
    last token is only predicted, so it is not read.
    """
    return packs([units], device, padded=padded)[0]


def packs(parts: Sequence[Sequence[Unit]], device: torch.device | str = "cpu", *, padded: bool = False) -> list[Packed]:
    """Several micro-batches, each as `pack` makes it: all at once, which takes a fraction of the time."""
    tokens = _Tokens.of([sequence for units in parts for unit in units for sequence in unit])
    rows, first = [], 0
    for units in parts:
        rows.append(_Row(tokens))
        first = rows[-1].fill(units, first, padded=padded)
    return _packed(rows, tokens, device, padded=padded)


@dataclass(frozen=True, eq=False)
class _Tokens:
    """S sequences one after another.

    Args:
        ids: int64 [T].
        starts: where each sequence begins.
        lengths: of each sequence.
        learned: int64, places of the supervised tokens but for a sequence's first, as nothing predicts it.
        counts: int64 [S], how many of them are in each sequence.
        free: tokens of each sequence that are read and predict nothing supervised before its first one that does.
    """

    ids: np.ndarray
    starts: list[int]
    lengths: list[int]
    learned: np.ndarray
    counts: np.ndarray
    free: list[int]

    @classmethod
    def of(cls, sequences: Sequence[Encoded]) -> Self:
        # Lists without a token would be of floats: nothing else is cast in an unsafe way.
        ids = np.concatenate([sequence.ids for sequence in sequences], dtype=np.int64, casting="unsafe")
        supervised = np.concatenate([sequence.supervised for sequence in sequences], dtype=bool, casting="unsafe")
        lengths = np.array([len(sequence.ids) for sequence in sequences])
        ends = np.cumsum(lengths)
        starts = ends - lengths
        supervised[starts[lengths > 0]] = False
        learned = np.flatnonzero(supervised)
        bounds = np.searchsorted(learned, np.append(starts, len(ids)))
        counts = np.diff(bounds)
        first = np.where(counts > 0, np.append(learned, 0)[bounds[:-1]] - starts, lengths)
        return cls(ids, starts.tolist(), lengths.tolist(), learned, counts, (first - 1).tolist())

    def shared(self, numbers: range, start: int) -> int:
        """Where some sequences part, but before the first token that predicts a supervised one in any of them."""
        if len(numbers) < 2:
            return start
        limit = min(self.free[numbers.start : numbers.stop])
        if limit <= start:
            return start
        places = np.array(self.starts[numbers.start : numbers.stop])[:, None] + np.arange(start, limit)
        beginnings = self.ids[places]
        apart = (beginnings[1:] != beginnings[0]).any(0)
        return start + int(apart.argmax()) if apart.any() else limit


class _Row:
    """A row that is put together of parts of sequences."""

    def __init__(self, tokens: _Tokens) -> None:
        self._tokens = tokens
        self.pieces: list[Piece] = []
        self.parts: list[slice] = []  # of the tokens' ids, for each piece
        self.positions: list[int] = []  # of each piece's first token
        self.moved: list[int] = []  # how much later each sequence's own tokens stand than in `tokens`
        self.length = 0

    def fill(self, units: Sequence[Unit], first: int, *, padded: bool) -> int:
        """Add all units, whose sequences are those from ``first`` on; returns the number of the sequence after them."""
        last = first + sum(map(len, units))
        common = 0 if padded else self._tokens.shared(range(first, last), 0)
        root = self._add(first, 0, common, None) if common else None
        for unit in units:
            own = range(first, first + len(unit))
            first = own.stop
            start, parent = common, root
            if not padded and len(unit) > 1 and (shared := self._tokens.shared(own, common)) > common:
                parent = self._add(own[0], common, shared, root)
                start = shared
            for number in own:  # nothing before its start predicts a supervised token
                self.moved.append(self.length - self._tokens.starts[number] - start)
                self._add(number, start, self._tokens.lengths[number] - 1, parent)
        return last

    def _add(self, number: int, first: int, last: int, parent: int | None) -> int:
        """Add a sequence's tokens from ``first`` to before ``last``; returns the number of the piece."""
        start, length = self._tokens.starts[number] + first, max(0, last - first)
        self.pieces.append(Piece(self.length, length, parent))
        self.parts.append(slice(start, start + length))
        self.positions.append(first)
        self.length += length
        return len(self.pieces) - 1


def _packed(rows: Sequence[_Row], tokens: _Tokens, device: torch.device | str, *, padded: bool) -> list[Packed]:
    """The rows, which have all sequences."""

    def split(values: np.ndarray, sizes: list[int]) -> Sequence[Tensor]:
        return torch.split(torch.from_numpy(values).to(device), sizes)

    lengths = [row.length for row in rows]
    pieces = np.array([piece.length for row in rows for piece in row.pieces])
    first = np.array([position for row in rows for position in row.positions])
    positions = np.repeat(first - np.cumsum(pieces) + pieces, pieces)
    positions += np.arange(len(positions))
    pairs = pieces * first + pieces * (pieces + 1) // 2  # a token sees those before it and itself
    pairs = np.add.reduceat(pairs, np.cumsum([0, *(len(row.pieces) for row in rows[:-1])]))
    moved = [places for row in rows for places in row.moved]
    counts = [len(row.moved) for row in rows]
    numbers = np.concatenate([np.arange(count) for count in counts])
    bounds = np.cumsum([0, *counts])
    learned = np.diff(np.append(0, np.cumsum(tokens.counts))[bounds]).tolist()
    read = np.diff(np.append(0, np.cumsum(tokens.lengths))[bounds]).tolist()
    return [
        Packed(ids[None], own[None], plan, predicting, targets, sequence, count, all_tokens, seen, padded)
        for ids, own, plan, predicting, targets, sequence, count, all_tokens, seen in zip(
            split(np.concatenate([tokens.ids[part] for row in rows for part in row.parts]), lengths),
            split(positions, lengths),
            plans([row.pieces for row in rows], device, one_group=padded),
            split(tokens.learned + np.repeat(moved, tokens.counts) - 1, learned),
            split(tokens.ids[tokens.learned], learned),
            split(np.repeat(numbers, tokens.counts), learned),
            counts,
            read,
            pairs.tolist(),
            strict=True,
        )
    ]
