"""The shards of a version in the making, as global steps see them."""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from posttrain.data.records.schema import CHANGED, RECORD
from posttrain.data.steps.step import Known, Likeness, Part
from posttrain.data.versions.shard import Shard
from posttrain.jobs.engine import Engine

Item = TypeVar("Item")
Result = TypeVar("Result")

_DECODED_BYTES = 1 << 30


@dataclass(frozen=True)
class ShardPart:
    """A `posttrain.data.steps.step.Part` that is a shard; ``place``: of the step in the recipe."""

    shard: Shard
    place: int

    @property
    def rows(self) -> int:
        return self.shard.rows

    def sketches(self) -> pa.Table:
        return self.shard.sketches(self.place)

    def take(self, rows: npt.NDArray[np.int64]) -> pa.Table:
        return self.shard.records().take(pa.array(rows, pa.int64()))


@dataclass
class ShardCorpus:
    """A `posttrain.data.steps.step.Corpus` over shards on disk: what is in memory at a time is bounded.

    Attributes:
        place: of the step in the recipe, which names its sketches.
        alive: bool [N].
        measured: RECORD table of what models are measured on.
        before: what the step knew of the first rows when the set was smaller.
        clusters: what earlier steps found.
        past: gives the splits that rows had in versions before.
        changes: gives what steps have rewritten so far.
    """

    shards: Sequence[Shard]
    place: int
    alive: npt.NDArray[np.bool_]
    engine: Engine
    measured: pa.Table = field(default_factory=RECORD.empty_table)
    before: Known | None = None
    clusters: Mapping[Likeness, pa.ChunkedArray] = field(default_factory=dict)
    past: Callable[[], npt.NDArray[np.int8]] = lambda: np.empty(0, np.int8)
    changes: Callable[[], pa.Table] = CHANGED.empty_table

    @cached_property
    def starts(self) -> npt.NDArray[np.int64]:
        """Row at which each shard begins, and N: int64 [shards + 1]."""
        return np.concatenate([[0], np.cumsum([shard.rows for shard in self.shards])]).astype(np.int64)

    @property
    def rows(self) -> int:
        return int(self.starts[-1])

    def sketches(self) -> pa.Table:
        return pa.concat_tables([shard.sketches(self.place) for shard in self.shards])

    def columns(self, names: Iterable[str]) -> pa.Table:
        wanted = list(names)
        return pa.concat_tables([shard.records(wanted) for shard in self.shards])

    def take(self, rows: npt.NDArray[np.int64]) -> pa.Table:
        rows = np.asarray(rows, dtype=np.int64)
        order = np.argsort(rows, kind="stable")
        shard_of = np.searchsorted(self.starts, rows[order], side="right") - 1
        parts = [RECORD.empty_table()]
        for index in np.unique(shard_of).tolist():
            inside = rows[order[shard_of == index]] - self.starts[index]
            parts.append(self._decoded(index).take(pa.array(inside)))
        back = np.empty(len(rows), dtype=np.int64)
        back[order] = np.arange(len(rows))
        return pa.concat_tables(parts).combine_chunks().take(pa.array(back))

    def known(self) -> Known | None:
        return self.before

    def sides(self) -> npt.NDArray[np.int8]:
        return self.past()

    def changed(self) -> pa.Table:
        return self.changes()

    def clustered(self) -> Mapping[Likeness, pa.ChunkedArray]:
        return self.clusters

    def parts(self) -> Sequence[Part]:
        return [ShardPart(shard, self.place) for shard in self.shards]

    def evaluation(self) -> pa.Table:
        return self.measured

    def map(self, function: Callable[[Item], Result], items: Iterable[Item]) -> Iterator[Result]:
        return self.engine.map(function, items)

    def map_tables(self, function: Callable[[pa.Table], Result]) -> Iterator[tuple[int, Result]]:
        results = self.engine.map(partial(_on_shard, function), self.shards)
        return zip(self.starts[:-1].tolist(), results, strict=True)

    _cache: "OrderedDict[int, pa.Table]" = field(default_factory=OrderedDict)

    def _decoded(self, index: int) -> pa.Table:
        """A shard's records; the ones used last are kept."""
        table = self._cache.pop(index, None)
        if table is None:
            table = self.shards[index].records()
            while self._cache and sum(one.nbytes for one in self._cache.values()) + table.nbytes > _DECODED_BYTES:
                self._cache.popitem(last=False)
        self._cache[index] = table
        return table


def _on_shard(function: Callable[[pa.Table], Result], shard: Shard) -> Result:
    return function(shard.records())
