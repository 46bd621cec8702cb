"""Applies one step to one table in memory: for tests, notebooks and small sets."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from posttrain.data.arrays import Splits
from posttrain.data.records.outcome import Outcome, reject_rows
from posttrain.data.records.record import CHANGED, RECORD
from posttrain.data.steps.step import DataStep, GlobalStep, PreviousState, RowStep, ShardView

Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass(frozen=True)
class TableCorpus:
    """A `posttrain.data.steps.step.Corpus` over one RECORD table in memory."""

    table: pa.Table
    step: GlobalStep
    evaluation: pa.Table = field(default_factory=RECORD.empty_table)
    previous_state: PreviousState | None = None
    clusters: Mapping[float, pa.ChunkedArray] = field(default_factory=dict)

    @property
    def rows(self) -> int:
        return int(self.table.num_rows)

    @cached_property
    def alive(self) -> npt.NDArray[np.bool_]:
        return np.ones(self.rows, dtype=bool)

    def sketches(self) -> pa.Table:
        return self.step.sketch(self.table)

    def columns(self, names: Iterable[str]) -> pa.Table:
        return self.table.select(list(names))

    def take(self, rows: npt.NDArray[np.int64]) -> pa.Table:
        return self.table.take(pa.array(rows, pa.int64()))

    def previous_splits(self) -> Splits:
        return np.full(self.rows, -1, dtype=np.int8)

    def id_changes(self) -> pa.Table:
        return CHANGED.empty_table()

    def shard_views(self) -> Sequence[ShardView]:
        return [self]

    def map(self, function: Callable[[Item], Result], items: Iterable[Item]) -> Iterator[Result]:
        return map(function, items)

    def map_tables(self, function: Callable[[pa.Table], Result]) -> Iterator[tuple[int, Result]]:
        return iter([(0, function(self.table))])


def apply_step(step: DataStep, table: pa.Table, evaluation: pa.Table | None = None) -> Outcome:
    """Applies a step to a RECORD table.

    Args:
        evaluation: RECORD table of what models are measured on, for steps that remove it from the training set.
    """
    if isinstance(step, RowStep):
        return step.apply(table)
    if not isinstance(step, GlobalStep):
        raise TypeError(f"{type(step).__name__} is neither a RowStep nor a GlobalStep")
    corpus = TableCorpus(table, step, RECORD.empty_table() if evaluation is None else evaluation)
    decision = step.decide(corpus)
    return reject_rows(table, step.name, decision.rejections, decision.facts)
