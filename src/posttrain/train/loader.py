"""The batches of our own trainer, packed ahead of the model. For another trainer see `row_loader`."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self, Unpack

import torch

from posttrain.models.packing import Packed, Unit, micro_batches, packs
from posttrain.train.order import Order, Place
from posttrain.train.stream import Reading, Stream


@dataclass(frozen=True)
class Lengths:
    """How much one optimiser step reads.

    Args:
        sequences: tokens of each sequence.
        computed: tokens of the rows, in which what sequences share stands once.
        pairs: of a token of the rows and one that it sees, itself included.
    """

    sequences: list[int]
    computed: int
    pairs: int

    @classmethod
    def of(cls, units: Sequence[Unit], packed: Sequence[Packed]) -> Self:
        """Of a step's units and its micro-batches."""
        sequences = [len(sequence.ids) for unit in units for sequence in unit]
        return cls(sequences, sum(one.ids.shape[1] for one in packed), sum(one.pairs for one in packed))


@dataclass(frozen=True, eq=False)
class Batch:
    """One optimiser step.

    Args:
        step: its number, from 0.
        epoch: passes over the data that were finished before.
        rows: of each micro-batch, the numbers of its units.
        packed: the micro-batches, on the model's device.
        lengths: how much of it there is.
    """

    step: int
    epoch: int
    rows: list[list[int]]
    packed: list[Packed]
    lengths: Lengths


class Loader(Stream[Sequence[Unit], Batch]):
    """The batches of an order's steps one after another, as `Stream` has it.

    Args:
        units: the training set.
        order: whose rows are in which step.
        budget: tokens of a micro-batch at most.
        device: where the batches are wanted.
        padded: whether the model needs padded rows.
        reading: see `Reading`.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        order: Order,
        budget: int,
        *,
        device: torch.device | str = "cpu",
        padded: bool = False,
        **reading: Unpack[Reading],
    ) -> None:
        super().__init__(units, order, budget, **reading)
        self._device, self._padded = device, padded

    def _make(self, place: Place, step: int, rows: list[int], budget: int) -> Batch:
        take = getattr(self._units, "take", None)
        units = take(rows).views() if take else [self._units[row] for row in rows]
        parts = list(micro_batches(units, budget))
        packed = packs(parts, self._device, padded=self._padded)
        first, groups = 0, []
        for part in parts:
            groups.append(rows[first : first + len(part)])
            first += len(part)
        return Batch(step, place.epoch, groups, packed, Lengths.of(units, packed))
