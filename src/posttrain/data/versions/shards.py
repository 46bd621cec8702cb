"""Makes shards of a version on workers, reads them, and presents them to global steps as one corpus."""

import json
import os
import shutil
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute
import pyarrow.ipc
import pyarrow.parquet as parquet

from posttrain.data.arrays import Splits
from posttrain.data.reading.pieces import Piece, read_piece
from posttrain.data.records.record import CHANGED, FACT, RECORD, REJECTED, concat
from posttrain.data.steps.step import GlobalStep, PreviousState, RowStep, ShardView
from posttrain.jobs.map import Engine
from posttrain.store.files import make_folder
from posttrain.store.hashing import digest
from posttrain.store.workspace import Workspace

VERSION = 1

USER_IDS = "user_ids.parquet"

RECORDS, REJECTIONS, CHANGES, FACTS, SUMMARY = (
    "records.parquet",
    "rejected.parquet",
    "changed.parquet",
    "facts.parquet",
    "shard.json",
)

Item = TypeVar("Item")

Result = TypeVar("Result")

_DECODED_BYTES = 1 << 30  # of shards that are cached


@dataclass(frozen=True)
class Shard:
    """Points to a finished shard's folder, and holds its summary.

    Attributes:
        key: SHA-256 of all that the content depends on, 64 hex characters.
        rows: Number of records.
        funnel: Counts of what each step did, as ``[step, reason, count]``; the first entry counts the rows read.
        shape: Shape of the records in the file; None where there was no file.
    """

    folder: Path
    key: str
    rows: int
    funnel: list[list[Any]]
    shape: str | None
    piece: dict[str, Any]

    @staticmethod
    def open(folder: Path) -> "Shard":
        """Opens the shard that `ShardTask` left in ``folder``."""
        return Shard(folder, **json.loads((folder / SUMMARY).read_bytes()))

    def records(self, columns: Sequence[str] | None = None) -> pa.Table:
        """Reads the RECORD table, or some of its columns."""
        # One thread: shards are read by several processes at once.
        return parquet.read_table(self.folder / RECORDS, columns=columns, use_threads=False)

    def sketches(self, step: int) -> pa.Table:
        """Memory-maps the sketches for the global step ``step`` of the recipe."""
        with pa.memory_map(str(self.folder / _sketch_file(step))) as source:
            return pyarrow.ipc.open_file(source).read_all()


@dataclass(frozen=True)
class PreviousShard:
    """Describes a shard as the steps up to here left it.

    Attributes:
        dropped: int64, rows that a global step rejected.
        untouched: int64, held-out rows, none of them dropped, that skip the steps. They come last.
    """

    shard: Shard
    dropped: npt.NDArray[np.int64]
    untouched: npt.NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))


@dataclass(frozen=True)
class ShardTask:
    """Makes one shard; pickled to a worker. The same task gives the same bytes wherever it runs.

    Attributes:
        source: A piece of a file, or a shard of the phase before.
        columns: Columns of the file, for a piece.
        labels: The closed label set that a piece's answers keep to; empty for open-ended answers.
        steps: Row steps that run on the rows.
        sketchers: The global steps that follow, by their index in the recipe.
        parent: The folder in which the shard's own, named by its key, is created.
        skip_errors: Leave out records of a piece that cannot be read. Not in the key: without it such a piece has no
            shard at all, and a version that grows from one with it takes its shards as they are.
    """

    source: Piece | PreviousShard
    columns: Mapping[str, str] | None
    labels: tuple[str, ...]
    steps: tuple[RowStep, ...]
    sketchers: tuple[tuple[int, GlobalStep], ...]
    parent: Path
    skip_errors: bool = False

    @property
    def key(self) -> str:
        """SHA-256 of all that the shard's content depends on."""
        return digest(
            {
                "version": VERSION,
                "source": self._source_key(),
                "steps": [step.key() for step in self.steps],
                # The index is part of it, as it names the file of the sketch.
                "sketches": [[index, step.sketch_key()] for index, step in self.sketchers],
            }
        )

    @property
    def finished(self) -> Path | None:
        """The shard's folder, if it exists already."""
        folder = self.parent / self.key
        return folder if (folder / SUMMARY).exists() else None

    def _source_key(self) -> list[Any]:
        """Returns JSON values that identify the source."""
        if isinstance(self.source, Piece):
            # The name of the file counts, because records hold it; its path does not.
            return [self.source.described(), dict(self.columns or {}), list(self.labels)]
        previous = self.source
        return [previous.shard.key, previous.dropped.tolist(), previous.untouched.tolist()]

    def __call__(self) -> Path:
        """Makes the shard unless it exists, and returns its folder.

        Raises:
            UserError: a record is bad, with file and line.
        """
        if (finished := self.finished) is not None:
            return finished
        folder = self.parent / self.key
        # The process id keeps two workers with the same task apart.
        unfinished = self.parent / f"{self.key}.{os.getpid()}.unfinished"
        shutil.rmtree(unfinished, ignore_errors=True)
        make_folder(unfinished)
        self._fill(unfinished)
        # The rename comes last: a folder under its key is always whole, whenever the process is killed.
        os.replace(unfinished, folder)
        return folder

    def _fill(self, folder: Path) -> None:
        """Runs the row steps and writes records, rejections, changes, facts, sketches and summary."""
        table, untouched, rejections, funnel, shape, piece = self._start(folder)
        changes: list[pa.Table] = []
        facts: list[pa.Table] = []
        for step in self.steps:
            before = table
            table, rejected, changed, measurements = step.apply(table)
            rejections.append(rejected)
            changes.append(changed)
            facts += [fact_table(before, step.name, name, values) for name, values in measurements.items()]
            # Each shard counts for itself, so that the funnel needs no second pass over all rejections.
            counts = Counter(rejected["reason"].to_pylist())
            funnel += [[step.name, reason, count] for reason, count in counts.items()]
            if added := table.num_rows - (before.num_rows - rejected.num_rows):
                funnel.append([step.name, "added", -added])
        # Untouched rows come last, so that the pipeline knows their splits by position.
        table = concat([table, untouched])
        parquet.write_table(table, folder / RECORDS, compression="zstd")
        parquet.write_table(concat(rejections, REJECTED), folder / REJECTIONS, compression="zstd")
        parquet.write_table(concat(changes, CHANGED), folder / CHANGES, compression="zstd")
        parquet.write_table(concat(facts, FACT), folder / FACTS, compression="zstd")
        for index, sketcher in self.sketchers:
            sketch = sketcher.sketch(table).combine_chunks()
            # Arrow, not Parquet: sketches are mapped into memory, where all shards together may exceed it.
            with pyarrow.ipc.new_file(str(folder / _sketch_file(index)), sketch.schema) as file:
                file.write_table(sketch)
        summary = {"key": self.key, "rows": table.num_rows, "funnel": funnel, "shape": shape, "piece": piece}
        (folder / SUMMARY).write_text(json.dumps(summary, ensure_ascii=False, sort_keys=True), encoding="utf-8")

    def _start(
        self, folder: Path
    ) -> tuple[pa.Table, pa.Table, list[pa.Table], list[list[Any]], str | None, dict[str, Any]]:
        """Reads the rows to process, the untouched rows, and what the source knows of them."""
        if isinstance(self.source, Piece):
            piece = read_piece(self.source, self.columns, self.labels, skip_errors=self.skip_errors)
            funnel = [["read", "in", piece.records.num_rows + sum(piece.left_out.values())]]
            funnel += [["read", kind, count] for kind, count in piece.left_out.items()]
            if piece.user_ids.num_rows:
                parquet.write_table(piece.user_ids, folder / USER_IDS, compression="zstd")
            return (
                piece.records,
                RECORD.empty_table(),
                [piece.unreadable],
                funnel,
                piece.shape,
                self.source.described(),
            )
        previous = self.source
        table = previous.shard.records()
        is_processed, is_untouched = np.ones(table.num_rows, dtype=bool), np.zeros(table.num_rows, dtype=bool)
        is_processed[previous.dropped] = is_processed[previous.untouched] = False
        is_untouched[previous.untouched] = True
        untouched = table.filter(pa.array(is_untouched))
        return (
            table.filter(pa.array(is_processed)),
            untouched,
            [],
            [],
            previous.shard.shape,
            previous.shard.piece,
        )


def fact_table(table: pa.Table, step: str, name: str, values: pa.Array) -> pa.Table:
    """Builds a FACT table of one measurement of the rows of a RECORD table, without nulls."""
    numeric = not pa.types.is_string(values.type)
    nothing = pa.nulls(len(values), pa.string() if numeric else pa.float64())
    columns = [
        table["id"],
        pa.array([step] * len(values), pa.string()),
        pa.array([name] * len(values), pa.string()),
        values.cast(pa.float64()) if numeric else nothing,
        nothing if numeric else values,
    ]
    return pa.table(columns, schema=FACT).filter(pa.compute.is_valid(values))


def _sketch_file(index: int) -> str:
    """Returns the file name of the sketches for the step at ``index``."""
    return f"sketch-{index}.arrow"


@dataclass(frozen=True)
class CorpusShard:
    """Presents a shard as a `posttrain.data.steps.step.ShardView`; ``index`` is that of the step in the chain."""

    shard: Shard
    index: int

    @property
    def rows(self) -> int:
        return self.shard.rows

    def sketches(self) -> pa.Table:
        return self.shard.sketches(self.index)

    def take(self, rows: npt.NDArray[np.int64]) -> pa.Table:
        return self.shard.records().take(pa.array(rows, pa.int64()))


@dataclass
class ShardCorpus:
    """Presents shards on disk as a `posttrain.data.steps.step.Corpus`, in bounded memory.

    Attributes:
        index: Index of the step in the chain, which names its sketches.
        alive: bool [N].
        evaluation: RECORD table of the evaluation records.
        previous_state: State of the step for the first rows, from when the set was smaller.
        clusters: Clusters that earlier steps computed.
        read_previous_splits: Returns the splits that rows had in an earlier version; None without one.
        read_id_changes: Returns what steps have rewritten so far.
    """

    shards: Sequence[Shard]
    index: int
    alive: npt.NDArray[np.bool_]
    engine: Engine
    evaluation: pa.Table = field(default_factory=RECORD.empty_table)
    previous_state: PreviousState | None = None
    clusters: Mapping[float, pa.ChunkedArray] = field(default_factory=dict)
    read_previous_splits: Callable[[], Splits] | None = None
    read_id_changes: Callable[[], pa.Table] = CHANGED.empty_table

    @cached_property
    def starts(self) -> npt.NDArray[np.int64]:
        """Row at which each shard begins, and N: int64 [shards + 1]."""
        return np.concatenate([[0], np.cumsum([shard.rows for shard in self.shards])]).astype(np.int64)

    @property
    def rows(self) -> int:
        return int(self.starts[-1])

    def sketches(self) -> pa.Table:
        return pa.concat_tables([shard.sketches(self.index) for shard in self.shards])

    def columns(self, names: Iterable[str]) -> pa.Table:
        columns = list(names)
        return pa.concat_tables([shard.records(columns) for shard in self.shards])

    def take(self, rows: npt.NDArray[np.int64]) -> pa.Table:
        rows = np.asarray(rows, dtype=np.int64)
        # Sorted by shard, so that each shard is decoded once; `back` restores the caller's order.
        order = np.argsort(rows, kind="stable")
        shard_of = np.searchsorted(self.starts, rows[order], side="right") - 1
        parts = [RECORD.empty_table()]
        for index in np.unique(shard_of).tolist():
            inside = rows[order[shard_of == index]] - self.starts[index]
            parts.append(self._decoded(index).take(pa.array(inside)))
        back = np.empty(len(rows), dtype=np.int64)
        back[order] = np.arange(len(rows))
        return pa.concat_tables(parts).combine_chunks().take(pa.array(back))

    def previous_splits(self) -> Splits:
        if self.read_previous_splits is None:
            return np.full(self.rows, -1, dtype=np.int8)
        return self.read_previous_splits()

    def id_changes(self) -> pa.Table:
        return self.read_id_changes()

    def shard_views(self) -> Sequence[ShardView]:
        return [CorpusShard(shard, self.index) for shard in self.shards]

    def map(self, function: Callable[[Item], Result], items: Iterable[Item]) -> Iterator[Result]:
        return self.engine.map(function, items)

    def map_tables(self, function: Callable[[pa.Table], Result]) -> Iterator[tuple[int, Result]]:
        results = self.engine.map(partial(_apply_to_shard, function), self.shards)
        return zip(self.starts[:-1].tolist(), results, strict=True)

    _cache: "OrderedDict[int, pa.Table]" = field(default_factory=OrderedDict)

    def _decoded(self, number: int) -> pa.Table:
        """Reads a shard's records, and caches the shards used last."""
        table = self._cache.pop(number, None)
        if table is None:
            table = self.shards[number].records()
            # Least recently used shards go first: global steps read neighbouring rows again and again.
            while self._cache and sum(cached.nbytes for cached in self._cache.values()) + table.nbytes > _DECODED_BYTES:
                self._cache.popitem(last=False)
        self._cache[number] = table
        return table


def _apply_to_shard(function: Callable[[pa.Table], Result], shard: Shard) -> Result:
    """Applies a function to a shard's records; a module-level function, so that it can be pickled."""
    return function(shard.records())


def commit_shard(workspace: Workspace, shard: Shard) -> str:
    """Commits a shard as an artifact, unless it is one already, and returns its id."""
    # Scratch folders are named by the shard's key, artifacts by their id.
    if shard.folder.name != shard.key:
        return shard.folder.name
    with workspace.artifacts.temporary_folder() as folder:
        for file in sorted(shard.folder.iterdir()):
            # Hard links spare the copy; scratch and artifact share the same bytes until scratch goes.
            os.link(file, folder / file.name)
        meta = {"rows": shard.rows, "piece": shard.piece}
        artifact = workspace.artifacts.commit(folder, "records", meta)
    workspace.metadata.add_artifact(artifact)
    return artifact.id
