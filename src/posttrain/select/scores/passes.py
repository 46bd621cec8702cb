"""Runs a group of scores over records in one pass, chunk by chunk, with finished chunks cached on disk."""

from __future__ import annotations

import hashlib
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
from posttrain.store.files import make_folder, remove_tree, write_atomically
from posttrain.store.hashing import digest
from posttrain.store.progress import progress_bar

if TYPE_CHECKING:
    from posttrain.models.language_model import LanguageModel

log = logging.getLogger("posttrain")

KEY = "key"

_DIGEST_SIZE = hashlib.sha256().digest_size


@dataclass(frozen=True)
class ScoringInput:
    """A record as far as its scores depend on it.

    Attributes:
        prompt: what the model is shown, without the task's system message and template.
        answers: what is scored after it; none where the model gives its own.
    """

    prompt: Turns
    answers: tuple[str, ...] = ()

    @cached_property
    def key(self) -> str:
        """64 hex characters: two records with the same have the same scores."""
        return digest([self.prompt, list(self.answers)])


@dataclass(frozen=True, eq=False)
class ScoreGroup:
    """Scores that come of one pass over the records.

    Attributes:
        name: of the group; with version and settings it decides what is computed.
        version: raised by hand when its meaning changes.
        settings: all that the numbers depend on besides model, task and record, as JSON values.
        score: gives one row a record, in their order; with no record, the columns.
        at_once: records that are lost at most when the pass is killed.
    """

    name: str
    version: int
    settings: Mapping[str, Any]
    score: Callable[[LanguageModel, Sequence[ScoringInput]], pa.Table]
    at_once: int


@dataclass(eq=False)
class ScoringModel:
    """A model that is only loaded once it is asked something new.

    Attributes:
        id: tells its weights.
        task: what it is asked to do.
        load: gives it: a language model, or a sentence model for a group that asks one.
    """

    id: str
    task: TaskConfig
    load: Callable[[], Any] = field(repr=False)

    @cached_property
    def lm(self) -> Any:
        """The model itself."""
        return self.load()

    @classmethod
    def of(cls, lm: LanguageModel) -> ScoringModel:
        """A model that is loaded; without an id, so that nothing of it can be kept."""
        return cls("", lm.task, lambda: lm)


@dataclass(frozen=True)
class CachePartition:
    """The chunks of one group of scores by one model; a chunk is a table with the records' keys in ``key``.

    Attributes:
        folder: where they lie; None keeps nothing.
    """

    folder: Path | None

    def read(self) -> Iterator[pa.Table]:
        """All chunks, in the order of their names; a damaged one is named and removed, for it to be made again."""
        if self.folder is None or not self.folder.is_dir():
            return
        for path in sorted(self.folder.iterdir()):
            if path.suffix != ".chunk":
                path.unlink()  # what a killed writer left
                continue
            content = path.read_bytes()
            if hashlib.sha256(content[_DIGEST_SIZE:]).digest() != content[:_DIGEST_SIZE]:
                log.warning("%s is damaged; scoring its records again", path)
                path.unlink()
                continue
            with pa.ipc.open_stream(content[_DIGEST_SIZE:]) as reader:
                yield reader.read_all()

    def write(self, chunk: pa.Table) -> None:
        """Keep a chunk: all of it or nothing, whenever the process is killed.

        Raises:
            UserError: the disk refused.
        """
        if self.folder is None:
            return
        make_folder(self.folder)
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, chunk.schema) as writer:
            writer.write_table(chunk)
        content = sink.getvalue().to_pybytes()
        path = self.folder / f"{digest(chunk[KEY].to_pylist())[:32]}.chunk"
        write_atomically(path, hashlib.sha256(content).digest() + content)


@dataclass(frozen=True)
class ScoreCache:
    """Scores by model.

    Attributes:
        folder: where they lie, a folder a model in it; None keeps nothing.
    """

    folder: Path | None = None

    def shelf(self, model: str, group: str) -> CachePartition:
        """Where a model's scores of one group lie; a model without an id has no place."""
        return CachePartition(self.folder / model / group if self.folder and model else None)

    def keep_only(self, models: Collection[str]) -> None:
        """Remove the scores of all other models."""
        if self.folder is None or not self.folder.is_dir():
            return
        for one in sorted(self.folder.iterdir()):
            if one.name not in models:
                remove_tree(one)


def cached_scores(
    group: ScoreGroup, model: ScoringModel, records: Sequence[ScoringInput], cache: ScoreCache
) -> pa.Table:
    """The scores of one group, a row a record.

    Records that are not known yet are cut into chunks in the order given, and each chunk is kept once it is done. A
    pass that was killed therefore goes on with the chunk it was at, the same one as in an uninterrupted pass: the
    numbers are the same to the last bit. A record whose scores were kept by an earlier pass has the numbers of that
    pass, whatever stood beside it there.

    Args:
        group: what is computed.
        model: which model is asked; it is loaded only if there is something new to score.
        records: N of them; those with the same content are scored once.
        cache: of the scores of earlier passes.
    """
    named = digest(
        {
            "group": group.name,
            "version": group.version,
            "settings": dict(group.settings),
            "task": model.task.model_dump(mode="json"),
        }
    )
    shelf = cache.shelf(model.id, f"{group.name}-{named[:16]}")
    wanted = {one.key: one for one in records}
    # Of each kept chunk only the rows that are asked for stay in memory.
    tables = [_wanted_rows(chunk, wanted) for chunk in shelf.read()]
    known = {key for table in tables for key in table[KEY].to_pylist()}
    rest = [one for key, one in wanted.items() if key not in known]
    if known:
        log.info("  %s: %d of %d records were scored before", group.name, len(known), len(wanted))
    with progress_bar(f"scoring: {group.name.replace('_', ' ')}", len(rest), "records") as advance:
        for start in range(0, len(rest), group.at_once):
            chunk = rest[start : start + group.at_once]
            keys = pa.array([one.key for one in chunk], pa.string())
            table = group.score(model.lm, chunk).append_column(KEY, keys)
            shelf.write(table)
            tables.append(table)
            advance(len(chunk))
    if not wanted:
        return group.score(model.lm, [])
    whole = pa.concat_tables(tables)
    row_of = {key: row for row, key in enumerate(whole[KEY].to_pylist())}
    rows = pa.array([row_of[one.key] for one in records], pa.int64())
    return whole.take(rows).drop_columns(KEY).combine_chunks()


def _wanted_rows(chunk: pa.Table, wanted: dict[str, ScoringInput]) -> pa.Table:
    return chunk.filter(pa.array([key in wanted for key in chunk[KEY].to_pylist()], pa.bool_()))


def prompts_of(pool: pa.Table) -> list[Turns]:
    """What the model is asked by each record.

    Raises:
        UserError: a record has neither a prompt nor a text.
    """
    prompts: list[Turns] = []
    for row in pool.select(["id", "prompt", "text"]).to_pylist():
        prompt = record_turns(row)
        if not prompt:
            raise UserError("has neither a prompt nor a text", where=f"pool record {row['id']}")
        prompts.append(prompt)
    return prompts


def to_list_column(rows: npt.NDArray[Any]) -> pa.FixedSizeListArray:
    """A matrix [N, D] as a column of lists of D float32 numbers."""
    return pa.FixedSizeListArray.from_arrays(pa.array(rows.ravel(), pa.float32()), rows.shape[1])


def to_matrix(table: pa.Table, name: str) -> npt.NDArray[np.float32]:
    """What `to_list_column` made a column of: float32 [N, D]."""
    width = table.schema.field(name).type.list_size
    column = pa.concat_arrays(table[name].chunks) if table.num_rows else pa.array([], table.schema.field(name).type)
    values: npt.NDArray[np.float32] = column.flatten().to_numpy(zero_copy_only=False).reshape(-1, width)
    return values
