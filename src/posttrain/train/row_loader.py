"""The steps of an order as packed rows, for any trainer of causal language models."""

from dataclasses import dataclass

from posttrain.train.order import Order, Place
from posttrain.train.stream import Stream
from posttrain.train.tokens.config import LoaderConfig
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


class RowLoader(Stream[RowBatch]):
    """The steps of an order as packed rows one after another, as `Stream` has it.

    Args:
        units: the training set, on the disk.
        order: whose rows are in which step.
        budget: tokens of a row at most.
        config: threads, and steps packed ahead.
        rank: which process this is, from 0.
        world_size: how many there are.
    """

    def __init__(
        self,
        units: TokenSet,
        order: Order,
        budget: int,
        *,
        config: LoaderConfig | None = None,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        super().__init__(units, order, config=config, rank=rank, world_size=world_size)
        self._set, self._budget = units, budget

    @property
    def budget(self) -> int:
        """Tokens of a row at most."""
        return self._budget

    def _make(self, place: Place, step: int, rows: list[int], budget: int) -> RowBatch:
        return RowBatch(step, place.epoch, rows, packed_rows(self._set.take(rows), budget))
