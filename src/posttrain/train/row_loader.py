"""The steps of an order as packed rows in NumPy, for any other trainer of causal language models than ours."""

from dataclasses import dataclass

from posttrain.train.order import Place
from posttrain.train.stream import Stream
from posttrain.train.tokens.rows import PackedRows, packed_rows
from posttrain.train.tokens.token_set import TokenSet


@dataclass(frozen=True, eq=False)
class RowBatch:
    """One step.

    Args:
        step: its number, from 0.
        epoch: passes over the data that were finished before.
        rows: the numbers of its units, in their order.
        packed: their tokens.
    """

    step: int
    epoch: int
    rows: list[int]
    packed: PackedRows


class RowLoader(Stream[TokenSet, RowBatch]):
    """The steps of an order as packed rows one after another, as `Stream` has it."""

    def _make(self, place: Place, step: int, rows: list[int], budget: int) -> RowBatch:
        return RowBatch(step, place.epoch, rows, packed_rows(self._units.take(rows), budget))
