"""Reads labelled records of a workspace or of files, with their embeddings."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from posttrain.data.reading.reader import read
from posttrain.data.records.record import concat
from posttrain.loop.config import Config
from posttrain.loop.context import RoundContext, model_key
from posttrain.loop.history import parent_dataset
from posttrain.loop.model_registry import ModelRegistry
from posttrain.loop.stage import CachedWork
from posttrain.models.task import record_turns
from posttrain.select.config import CHAMPION
from posttrain.select.scores.table import embed_records
from posttrain.store.errors import UserError
from posttrain.store.workspace import Workspace

_FILE = "embeddings.npy"

Embedded = tuple[npt.NDArray[np.float32], list[str]]


def labelled_dataset(context: RoundContext) -> str:
    """Finds the set of all records that the loop has labels of; returns its id.

    Raises:
        UserError: nothing has run or has been labelled yet.
    """
    if ModelRegistry(context.workspace).champion is None:
        raise UserError("nothing has run here yet", fix="posttrain run, or name a file of labelled records")
    dataset = parent_dataset(context.workspace)
    if not context.dataset(dataset).records.num_rows:
        raise UserError("nothing has been labelled here yet", fix="name a file of labelled records")
    return dataset


def labelled_records(files: Sequence[Path], columns: Mapping[str, str] | None) -> pa.Table:
    """Reads files whose records all have an answer; returns a RECORD table.

    Raises:
        UserError: a file cannot be read, or one of its records has no answer.
    """
    records = concat([table for file in files for table in read(file, columns)])
    answers = records["completion"].to_pylist()
    # An error instead of leaving records out: most often the column of answers has another name.
    if None in answers:
        row = answers.index(None)
        where = f"{records['source'][row].as_py()}:{records['line'][row].as_py()}"
        raise UserError("the record has no answer to learn from", where=where, fix="map it: --column completion=NAME")
    return records


def embed_dataset(context: RoundContext, dataset: str, embedder: str) -> npt.NDArray[np.float32]:
    """Embeds a set's inputs as float32 [N, D]; computed once and found again.

    Args:
        context: Workspace and config.
        dataset: Id of the set.
        embedder: ``champion``, or a sentence model as `posttrain.models.embedder_source.find_embedder` takes it.

    Raises:
        UserError: there is no such model.
    """
    artifact = context.run(EmbedDataset(dataset, embedder, ModelRegistry(context.workspace).champion_id))
    embeddings: npt.NDArray[np.float32] = np.load(context.path(artifact.id) / _FILE, allow_pickle=False)
    return embeddings


@dataclass(frozen=True)
class EmbedDataset(CachedWork):
    """Embeds the inputs of a dataset by the champion or a sentence model."""

    dataset: str
    embedder: str
    champion: str
    name = "embed"
    kind = "embeddings"
    seeded = False

    def inputs(self, context: RoundContext) -> dict[str, str]:
        """Returns the dataset and the model."""
        from posttrain.models.embedder_source import embedder_key

        if self.embedder == CHAMPION:
            return {"dataset": self.dataset, "model": self.champion}
        # Without the champion: embeddings by a sentence model outlive it.
        return {"dataset": self.dataset, "embedder": embedder_key(self.embedder)}

    def settings(self, context: RoundContext) -> dict[str, Any]:
        """Returns the task, for the champion's embeddings."""
        # It decides the prompt that the champion reads; a sentence model reads the bare text.
        return model_key(context) if self.embedder == CHAMPION else {}

    def run(self, context: RoundContext, out: Path, scratch: Path) -> dict[str, Any]:
        """Writes the embeddings."""
        records = context.dataset(self.dataset).records
        if self.embedder == CHAMPION:
            embeddings = embed_records(context.model(self.champion), records)
        else:
            embeddings = embed_sentences(records, self.embedder)
        np.save(out / _FILE, embeddings, allow_pickle=False)
        return {"records": len(embeddings), "width": embeddings.shape[1]}


def embed_sentences(records: pa.Table, embedder: str) -> npt.NDArray[np.float32]:
    """Embeds the records' inputs with a sentence model as float32 [N, D].

    Raises:
        UserError: there is no such model.
    """
    from posttrain.models.embedder import Embedder

    return Embedder.load(embedder).embed(inputs(records, "\n"))


def inputs(records: pa.Table, between: str = " / ") -> list[str]:
    """Joins the turns of each record's input with ``between``."""
    rows = records.select(["prompt", "text"]).to_pylist()
    return [between.join(turn["content"] for turn in record_turns(row)) for row in rows]


def embed_labelled(workspace: Workspace, config: Config, embedder: str | None = None) -> Embedded:
    """Embeds the records that the loop has labels of; returns float32 [N, D] and their answers.

    Args:
        workspace: The workspace.
        config: Its config.
        embedder: ``champion`` or a sentence model; None for the loop's own (``select.embeddings``).

    Raises:
        UserError: nothing has been labelled yet, or there is no such model.
    """
    context = RoundContext(workspace, config, 0, in_round=False)
    records = context.dataset(labelled_dataset(context)).records
    embedder = config.select.embeddings if embedder is None else embedder
    if embedder == CHAMPION:
        embeddings = embed_records(context.model(ModelRegistry(workspace).champion_id), records)
    else:
        embeddings = embed_sentences(records, embedder)
    return embeddings, records["completion"].to_pylist()


def embed_labelled_files(files: Sequence[Path], columns: Mapping[str, str] | None, embedder: str) -> Embedded:
    """Embeds the labelled records of files with a sentence model; returns float32 [N, D] and their answers.

    Raises:
        UserError: a file cannot be read or has no answers, or there is no such model.
    """
    records = labelled_records(files, columns)
    return embed_sentences(records, embedder), records["completion"].to_pylist()


def cosine_similarities(context: RoundContext, record: dict[str, Any], dataset: str) -> np.ndarray:
    """Computes the cosines of the champion's embeddings of a record's input and of each of a set: float64 [N]."""
    embeddings = embed_dataset(context, dataset, CHAMPION).astype(np.float64)
    table = pa.Table.from_pylist([record], schema=context.dataset(dataset).records.schema)
    query = embed_records(context.model(ModelRegistry(context.workspace).champion_id), table)[0].astype(np.float64)
    norms = np.linalg.norm(embeddings, axis=1) * np.linalg.norm(query)
    # An all-zero embedding has no direction: it is similar to nothing.
    similarities: np.ndarray = embeddings @ query / np.where(norms > 0, norms, 1)
    return similarities
