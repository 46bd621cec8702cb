"""Labelled records of a workspace or of files, with their embeddings."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from posttrain.data.reading.reader import read
from posttrain.data.records.schema import concat
from posttrain.loop.config import Config
from posttrain.loop.context import RoundContext, task_key
from posttrain.loop.history import carried_dataset
from posttrain.loop.registry import Registry
from posttrain.loop.stage import Stage
from posttrain.models.task import record_turns
from posttrain.select.scores.config import CHAMPION
from posttrain.select.scores.table import embed_records
from posttrain.store.errors import UserError
from posttrain.store.workspace import Workspace

_FILE = "embeddings.npy"

Embedded = tuple[npt.NDArray[np.float32], list[str]]


def labelled_dataset(context: RoundContext) -> str:
    """The id of the set of all records that the loop has labels of.

    Raises:
        UserError: nothing has run or has been labelled yet.
    """
    if Registry(context.workspace).champion is None:
        raise UserError("nothing has run here yet", fix="posttrain run, or name a file of labelled records")
    dataset = carried_dataset(context.workspace)
    if not context.dataset(dataset).records.num_rows:
        raise UserError("nothing has been labelled here yet", fix="name a file of labelled records")
    return dataset


def labelled_records(files: Sequence[Path], columns: Mapping[str, str] | None) -> pa.Table:
    """RECORD table of files, all of whose records have an answer.

    Raises:
        UserError: a file cannot be read, or one of its records has no answer.
    """
    records = concat([table for file in files for table in read(file, columns)])
    answers = records["completion"].to_pylist()
    if None in answers:
        row = answers.index(None)
        where = f"{records['source'][row].as_py()}:{records['line'][row].as_py()}"
        raise UserError("the record has no answer to learn from", where=where, fix="map it: --column completion=NAME")
    return records


def embedded(context: RoundContext, dataset: str, embedder: str) -> npt.NDArray[np.float32]:
    """Embeddings of a set's inputs, float32 [N, D]; computed once.

    Args:
        context: the workspace.
        dataset: id of the set.
        embedder: ``champion``, or a sentence model as `posttrain.models.embedder.find_embedder` takes it.

    Raises:
        UserError: there is no such model.
    """
    artifact = context.run(EmbedDataset(dataset, embedder, Registry(context.workspace).in_service))
    embeddings: npt.NDArray[np.float32] = np.load(context.path(artifact.id) / _FILE, allow_pickle=False)
    return embeddings


@dataclass(frozen=True)
class EmbedDataset(Stage):
    """Embeds the inputs of a dataset by the champion or a sentence model."""

    dataset: str
    embedder: str
    champion: str
    name = "embed"
    kind = "embeddings"
    seeded = False

    def inputs(self, context: RoundContext) -> dict[str, str]:
        """The dataset and the model."""
        from posttrain.models.embedder import embedder_key

        if self.embedder == CHAMPION:
            return {"dataset": self.dataset, "model": self.champion}
        return {"dataset": self.dataset, "embedder": embedder_key(self.embedder)}

    def settings(self, context: RoundContext) -> dict[str, Any]:
        """The task, which decides what the champion reads; a sentence model reads the bare text."""
        return task_key(context.config) if self.embedder == CHAMPION else {}

    def run(self, context: RoundContext, out: Path, scratch: Path) -> dict[str, Any]:
        """Write the embeddings."""
        records = context.dataset(self.dataset).records
        if self.embedder == CHAMPION:
            embeddings = embed_records(context.model(self.champion), records)
        else:
            embeddings = by_sentences(records, self.embedder)
        np.save(out / _FILE, embeddings, allow_pickle=False)
        return {"records": len(embeddings), "width": embeddings.shape[1]}


def by_sentences(records: pa.Table, embedder: str) -> npt.NDArray[np.float32]:
    """Embeddings of the records' inputs by a sentence model, float32 [N, D].

    Raises:
        UserError: there is no such model.
    """
    from posttrain.models.embedder import Embedder

    return Embedder.load(embedder).embed(inputs(records, "\n"))


def inputs(records: pa.Table, between: str = " / ") -> list[str]:
    """What each record asks, its turns with ``between`` between them."""
    rows = records.select(["prompt", "text"]).to_pylist()
    return [between.join(turn["content"] for turn in record_turns(row)) for row in rows]


def labelled_so_far(workspace: Workspace, config: Config, embedder: str | None = None) -> Embedded:
    """Embeddings, float32 [N, D], and the answers of the records that the loop has labels of.

    Args:
        workspace: the workspace.
        config: its config.
        embedder: ``champion`` or a sentence model; None for what the loop goes by (``select.scoring.embeddings``).

    Raises:
        UserError: nothing has been labelled yet, or there is no such model.
    """
    context = RoundContext(workspace, config, 0, in_round=False)
    records = context.dataset(labelled_dataset(context)).records
    embedder = config.select.scoring.embeddings if embedder is None else embedder
    if embedder == CHAMPION:
        embeddings = embed_records(context.model(Registry(workspace).in_service), records)
    else:
        embeddings = by_sentences(records, embedder)
    return embeddings, records["completion"].to_pylist()


def labelled_in(files: Sequence[Path], columns: Mapping[str, str] | None, embedder: str) -> Embedded:
    """The same of files, by a sentence-embedding model.

    Raises:
        UserError: a file cannot be read or has no answers, or there is no such model.
    """
    records = labelled_records(files, columns)
    return by_sentences(records, embedder), records["completion"].to_pylist()


def cosine_similarities(context: RoundContext, record: dict[str, Any], dataset: str) -> np.ndarray:
    """The cosine of the champion's embeddings of a record's input and of each of a set: float64 [N]."""
    theirs = embedded(context, dataset, CHAMPION).astype(np.float64)
    table = pa.Table.from_pylist([record], schema=context.dataset(dataset).records.schema)
    own = embed_records(context.model(Registry(context.workspace).in_service), table)[0].astype(np.float64)
    sizes = np.linalg.norm(theirs, axis=1) * np.linalg.norm(own)
    similarities: np.ndarray = theirs @ own / np.where(sizes > 0, sizes, 1)
    return similarities
