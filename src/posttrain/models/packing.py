"""Micro-batches: sequences one after another in one row, what they share computed once."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from posttrain.models.attention import Piece, Plan, plan
from posttrain.models.chat import Encoded

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
    padded: bool


def micro_batches(units: Sequence[Unit], budget: int) -> Iterator[list[Unit]]:
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
    if padded:
        for sequence in (sequence for unit in units for sequence in unit):
            row.finish(sequence, 0, None)
        return row.packed(device, padded=True)
    common = _shared([sequence for unit in units for sequence in unit], 0)
    root = row.add(units[0][0].ids[:common], 0, None) if common else None
    for unit in units:
        start, parent = common, root
        if len(unit) > 1 and (shared := _shared(unit, common)) > common:
            parent = row.add(unit[0].ids[common:shared], common, root)
            start = shared
        for sequence in unit:
            row.finish(sequence, start, parent)
    return row.packed(device, padded=False)


class _Row:
    def __init__(self) -> None:
        self.ids: list[int] = []
        self.positions: list[int] = []
        self.pieces: list[Piece] = []
        self.predicting: list[int] = []
        self.targets: list[int] = []
        self.sequence: list[int] = []
        self.sequences = 0
        self.tokens = 0

    def add(self, ids: Sequence[int], position: int, parent: int | None) -> int:
        self.pieces.append(Piece(len(self.ids), len(ids), parent))
        self.ids += ids
        self.positions += range(position, position + len(ids))
        return len(self.pieces) - 1

    def finish(self, sequence: Encoded, start: int, parent: int | None) -> None:
        """Add what a sequence goes on with from ``start``, and what is learned from it."""
        offset = len(self.ids) - start
        self.add(sequence.ids[start:-1], start, parent)
        for place, on in enumerate(sequence.supervised):
            if on and place > 0:  # nothing predicts a first token
                self.predicting.append(offset + place - 1)
                self.targets.append(sequence.ids[place])
                self.sequence.append(self.sequences)
        self.sequences += 1
        self.tokens += len(sequence.ids)

    def packed(self, device: torch.device | str, *, padded: bool) -> Packed:
        def tensor(values: list[int]) -> Tensor:
            return torch.tensor(values, dtype=torch.long, device=device)

        return Packed(
            tensor(self.ids)[None],
            tensor(self.positions)[None],
            plan(self.pieces, device, one_group=padded),
            tensor(self.predicting),
            tensor(self.targets),
            tensor(self.sequence),
            self.sequences,
            self.tokens,
            padded,
        )


def _shared(sequences: Sequence[Encoded], start: int) -> int:
    """Where the sequences part, but before the first token that predicts a supervised one in any of them."""
    if len(sequences) < 2:
        return start
    limit = min(len(sequence.ids) - 1 for sequence in sequences)
    for sequence in sequences:
        first = next((place for place, on in enumerate(sequence.supervised) if on and place > 0), limit + 1)
        limit = min(limit, first - 1)
    low, high = (extreme.ids for extreme in (min(sequences, key=_ids), max(sequences, key=_ids)))
    shared = start
    while shared < limit and low[shared] == high[shared]:
        shared += 1
    return shared


def _ids(sequence: Encoded) -> list[int]:
    return sequence.ids
