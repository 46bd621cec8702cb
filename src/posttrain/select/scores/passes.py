"""Runs a group of scores over records in one pass, chunk by chunk, with finished chunks cached on disk."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from posttrain.models.task import TaskConfig, Turns, record_turns
from posttrain.store.errors import UserError
from posttrain.store.files import make_folder, read_checked, remove_tree, strip_checksum, write_checked
from posttrain.store.hashing import digest
from posttrain.store.progress import progress_bar

if TYPE_CHECKING:
    from posttrain.models.language_model import LanguageModel

log = logging.getLogger("posttrain")

KEY = "key"


@dataclass(frozen=True)
class ScoringInput:
    """The part of a record that its scores depend on.

    Attributes:
        prompt: shown to the model, without the task's system message and template.
        answers: scored after the prompt; empty where the model gives its own.
    """

    prompt: Turns
    answers: tuple[str, ...] = ()

    @cached_property
    def key(self) -> str:
        """64 hex characters: two records with the same key have the same scores."""
        return digest([self.prompt, list(self.answers)])


@dataclass(frozen=True, eq=False)
class ScoreGroup:
    """Scores that one pass over the records computes together.

    Attributes:
        name: identifies, with version and settings, what is computed.
        version: raised by hand when the meaning of the numbers changes.
        settings: everything that the numbers depend on besides model, task and record, as JSON values.
        score: returns one row per record, in their order; without records, the columns.
        chunk_size: records in a chunk, which a killed pass loses at most.
    """

    name: str
    version: int
    settings: Mapping[str, Any]
    score: Callable[[LanguageModel, Sequence[ScoringInput]], pa.Table]
    chunk_size: int


@dataclass(eq=False)
class ScoringModel:
    """A model that is loaded only once it has to score something new.

    Attributes:
        id: identifies its weights.
        task: the system message, template and labels that it is used with.
        load: returns a language model, or a sentence model for a group that takes one.
    """

    id: str
    task: TaskConfig
    load: Callable[[], Any] = field(repr=False)

    @cached_property
    def lm(self) -> Any:
        """The loaded model."""
        return self.load()

    @classmethod
    def from_language_model(cls, lm: LanguageModel) -> ScoringModel:
        """Wraps a loaded model; it has no id, so its scores are never cached."""
        return cls("", lm.task, lambda: lm)


@dataclass(frozen=True)
class CachePartition:
    """The chunks of one group of scores by one model; a chunk is a table with the records' keys in ``key``.

    Attributes:
        folder: holds the chunks; None caches nothing.
    """

    folder: Path | None

    def read(self) -> Iterator[pa.Table]:
        """Yields all chunks in the order of their names; removes a damaged one, with a warning: it is scored again."""
        if self.folder is None or not self.folder.is_dir():
            return
        for path in sorted(self.folder.iterdir()):
            if path.suffix != ".chunk":
                continue  # the temporary file of a writer that writes at this moment, or was killed
            content = read_checked(path)
            if content is None:
                path.unlink(missing_ok=True)
                continue
            with pa.ipc.open_stream(content) as reader:
                yield reader.read_all()

    def write(self, chunk: pa.Table) -> None:
        """Writes a chunk: all of it or nothing, whenever the process is killed.

        Raises:
            UserError: the disk refused.
        """
        if self.folder is None:
            return
        make_folder(self.folder)
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, chunk.schema) as writer:
            writer.write_table(chunk)
        # Named by its records: a pass that repeats a chunk overwrites it instead of adding a twin.
        path = self.folder / _chunk_name(chunk)
        write_checked(path, sink.getvalue().to_pybytes())


def chunk_problem(path: Path) -> str | None:
    """Returns what is wrong with a chunk's file; None if it is whole."""
    content = strip_checksum(path.read_bytes())
    if content is None:
        return "differs from its checksum"
    with pa.ipc.open_stream(content) as reader:
        name = _chunk_name(reader.read_all())
    return None if path.name == name else f"holds the records of {name}"


def _chunk_name(chunk: pa.Table) -> str:
    return f"{digest(chunk[KEY].to_pylist())[:32]}.chunk"


@dataclass(frozen=True)
class ScoreCache:
    """Finished scores on disk, by model and group.

    Attributes:
        folder: holds a folder a model; None caches nothing.
    """

    folder: Path | None = None

    def partition(self, model: str, group: str) -> CachePartition:
        """Returns the chunks of a model's group; those of a model without an id are not cached."""
        return CachePartition(self.folder / model / group if self.folder and model else None)

    def keep_only(self, models: Collection[str]) -> None:
        """Removes the scores of all other models."""
        if self.folder is None or not self.folder.is_dir():
            return
        for folder in sorted(self.folder.iterdir()):
            if folder.name not in models:
                remove_tree(folder)


def cached_scores(
    group: ScoreGroup, model: ScoringModel, records: Sequence[ScoringInput], cache: ScoreCache
) -> pa.Table:
    """Returns the scores of one group, a row per record, from the cache where it has them.

    A record whose scores an earlier pass cached keeps the numbers of that pass, whatever shared its batch there.

    Args:
        group: the scores.
        model: is loaded only if there is something new to score.
        records: N records; those with the same content are scored once.
        cache: the scores of earlier passes.
    """
    key = digest(
        {
            "group": group.name,
            "version": group.version,
            "settings": dict(group.settings),
            "task": model.task.key,
        }
    )
    partition = cache.partition(model.id, f"{group.name}-{key[:16]}")
    # By content: records that say the same are scored once, and a record keeps its scores when the pool grows.
    by_key = {record.key: record for record in records}
    # Only these records' rows of a cached chunk stay in memory: the cache may hold a pool of millions.
    tables = [_rows_with_keys(chunk, by_key) for chunk in partition.read()]
    cached = {key for table in tables for key in table[KEY].to_pylist()}
    missing = [record for key, record in by_key.items() if key not in cached]
    if cached and missing:
        log.info("  %s: %d of %d records were scored before", group.name, len(cached), len(by_key))
    with progress_bar(f"scoring: {group.name.replace('_', ' ')}", len(missing), "records") as advance:
        # Chunks are cut in the order of the records, so a killed pass resumes with the same chunk as an uninterrupted
        # one: a model's numbers depend, in the last bits, on the batch that a record is in.
        for start in range(0, len(missing), group.chunk_size):
            chunk = missing[start : start + group.chunk_size]
            keys = pa.array([record.key for record in chunk], pa.string())
            table = group.score(model.lm, chunk).append_column(KEY, keys)
            # Written before the next chunk is scored: a kill loses one chunk at most.
            partition.write(table)
            tables.append(table)
            advance(len(chunk))
    # Without records the group still gives its columns, which callers concatenate.
    if not by_key:
        return group.score(model.lm, [])
    whole = pa.concat_tables(tables)
    row_of = {key: row for row, key in enumerate(whole[KEY].to_pylist())}
    rows = pa.array([row_of[record.key] for record in records], pa.int64())
    return whole.take(rows).drop_columns(KEY).combine_chunks()


def _rows_with_keys(chunk: pa.Table, keys: Collection[str]) -> pa.Table:
    return chunk.filter(pa.array([key in keys for key in chunk[KEY].to_pylist()], pa.bool_()))


def prompts_of(pool: pa.Table) -> list[Turns]:
    """Returns the prompt of each record.

    Raises:
        UserError: a record has neither a prompt nor a text.
    """
    prompts = [record_turns(row) for row in pool.select(["prompt", "text"]).to_pylist()]
    if [] in prompts:
        raise UserError("has neither a prompt nor a text", where=record_location(pool, prompts.index([])))
    return prompts


def record_location(pool: pa.Table, row: int) -> str:
    """Returns the file and the line of a row's record, or its id where it came from no file."""
    record = pool.slice(row, 1).to_pylist()[0]
    if record.get("source") and record.get("line"):
        return f"{record['source']}:{record['line']}"
    return f"pool record {record['id']}"


def to_list_column(rows: npt.NDArray[Any]) -> pa.FixedSizeListArray:
    """Turns a matrix [N, D] into a column of lists of D float32 numbers."""
    return pa.FixedSizeListArray.from_arrays(pa.array(rows.ravel(), pa.float32()), rows.shape[1])


def to_matrix(table: pa.Table, name: str) -> npt.NDArray[np.float32]:
    """Turns a column of `to_list_column` back into a matrix, float32 [N, D]."""
    width = table.schema.field(name).type.list_size
    # `concat_arrays` refuses an empty list of chunks.
    column = pa.concat_arrays(table[name].chunks) if table.num_rows else pa.array([], table.schema.field(name).type)
    values: npt.NDArray[np.float32] = column.flatten().to_numpy(zero_copy_only=False).reshape(-1, width)
    return values
