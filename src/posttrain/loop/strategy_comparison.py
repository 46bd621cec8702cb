"""The records on which strategies are compared, and their embeddings."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from posttrain.data.reading.tables import read
from posttrain.data.records.schema import concat
from posttrain.loop.config import Config
from posttrain.loop.history import carried_dataset
from posttrain.loop.registry import Registry
from posttrain.loop.turn import Turn
from posttrain.models.request import request
from posttrain.select.score import embed_records
from posttrain.store.errors import UserError
from posttrain.store.workspace import Workspace

Embedded = tuple[npt.NDArray[np.float32], list[str]]


def labelled_so_far(workspace: Workspace, config: Config) -> Embedded:
    """Embeddings by the champion, float32 [N, D], and the answers of the records that the loop has labels of.

    Raises:
        UserError: nothing has been labelled yet.
    """
    champion = Registry(workspace).champion
    if champion is None:
        raise UserError("nothing has run here yet", fix="posttrain run, or name a file of labelled records")
    turn = Turn(workspace, config, 0, in_round=False)
    records = turn.dataset(carried_dataset(workspace)).records
    if not records.num_rows:
        raise UserError("nothing has been labelled here yet", fix="name a file of labelled records")
    return embed_records(turn.model(champion.model_id), records), records["completion"].to_pylist()


def labelled_in(files: Sequence[Path], columns: Mapping[str, str] | None, embedder: str) -> Embedded:
    """The same of files, by a sentence-embedding model.

    Raises:
        UserError: a file cannot be read or has no answers, or there is no such model.
    """
    from posttrain.models.embedder import Embedder

    records = concat([table for file in files for table in read(file, columns)])
    answers = records["completion"].to_pylist()
    if None in answers:
        row = answers.index(None)
        where = f"{records['source'][row].as_py()}:{records['line'][row].as_py()}"
        raise UserError("the record has no answer to learn from", where=where, fix="map it: --column completion=NAME")
    return Embedder.load(embedder).embed(_texts(records)), answers


def _texts(records: pa.Table) -> list[str]:
    rows = records.select(["prompt", "text"]).to_pylist()
    return ["\n".join(turn["content"] for turn in request(row)) for row in rows]
