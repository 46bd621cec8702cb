"""Micro-batches: sequences one after another in one row, what they share computed once."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from torch import Tensor

from posttrain.models.chat import Encoded
from posttrain.models.row_plan import Piece, Plan, plan

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
    row = _Row()
    found = [[_Tokens.of(sequence) for sequence in unit] for unit in units]
    everything = [sequence for unit in found for sequence in unit]
    if padded:
        for sequence in everything:
            row.finish(sequence, 0, None)
        return row.packed(device, padded=True)
    common = _shared(everything, 0)
    root = row.add(everything[0].ids[:common], 0, None) if common else None
    for unit in found:
        start, parent = common, root
        if len(unit) > 1 and (shared := _shared(unit, common)) > common:
            parent = row.add(unit[0].ids[common:shared], common, root)
            start = shared
        for sequence in unit:
            row.finish(sequence, start, parent)
    return row.packed(device, padded=False)


@dataclass(frozen=True, eq=False)
class _Tokens:
    """A sequence as arrays.

    Args:
        ids: int64 [L].
        learned: int64, places of the supervised tokens but for a first one, as nothing predicts it.
    """

    ids: np.ndarray
    learned: np.ndarray

    @classmethod
    def of(cls, sequence: Encoded) -> Self:
        learned = np.flatnonzero(np.array(sequence.supervised, dtype=bool)[1:]) + 1
        return cls(np.array(sequence.ids, dtype=np.int64), learned)


class _Row:
    def __init__(self) -> None:
        self.ids: list[np.ndarray] = []
        self.positions: list[np.ndarray] = []
        self.pieces: list[Piece] = []
        self.predicting: list[np.ndarray] = []
        self.targets: list[np.ndarray] = []
        self.length = 0
        self.tokens = 0

    def add(self, ids: np.ndarray, position: int, parent: int | None) -> int:
        self.pieces.append(Piece(self.length, len(ids), parent))
        self.ids.append(ids)
        self.positions.append(np.arange(position, position + len(ids)))
        self.length += len(ids)
        return len(self.pieces) - 1

    def finish(self, sequence: _Tokens, start: int, parent: int | None) -> None:
        """Add what a sequence goes on with from ``start``, and what is learned from it."""
        self.predicting.append(sequence.learned + (self.length - start - 1))
        self.targets.append(sequence.ids[sequence.learned])
        self.add(sequence.ids[start:-1], start, parent)
        self.tokens += len(sequence.ids)

    def packed(self, device: torch.device | str, *, padded: bool) -> Packed:
        def tensor(parts: list[np.ndarray]) -> Tensor:
            return torch.from_numpy(np.concatenate(parts)).to(device)

        counts = [len(targets) for targets in self.targets]
        return Packed(
            tensor(self.ids)[None],
            tensor(self.positions)[None],
            plan(self.pieces, device, one_group=padded),
            tensor(self.predicting),
            tensor(self.targets),
            tensor([np.repeat(np.arange(len(counts)), counts)]),
            len(counts),
            self.tokens,
            sum(int(positions.sum()) + len(positions) for positions in self.positions),
            padded,
        )


def _shared(sequences: Sequence[_Tokens], start: int) -> int:
    """Where the sequences part, but before the first token that predicts a supervised one in any of them."""
    if len(sequences) < 2:
        return start
    limit = min(len(one.ids) - 1 for one in sequences)
    limit = min([limit, *(int(one.learned[0]) - 1 for one in sequences if len(one.learned))])
    first, *others = sequences
    for other in others:
        apart = np.flatnonzero(first.ids[start:limit] != other.ids[start:limit])
        if len(apart):
            limit = start + int(apart[0])
    return max(start, limit)
