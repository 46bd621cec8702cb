"""The records on which strategies are compared, and their embeddings."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from posttrain.loop.config import Config
from posttrain.loop.labelled_records import by_sentences, labelled_dataset, labelled_records
from posttrain.loop.registry import Registry
from posttrain.loop.turn import Turn
from posttrain.select.score import embed_records
from posttrain.select.scores.config import CHAMPION
from posttrain.store.workspace import Workspace

Embedded = tuple[npt.NDArray[np.float32], list[str]]


def labelled_so_far(workspace: Workspace, config: Config, embedder: str | None = None) -> Embedded:
    """Embeddings, float32 [N, D], and the answers of the records that the loop has labels of.

    Args:
        workspace: the workspace.
        config: its config.
        embedder: ``champion`` or a sentence model; None for what the loop goes by (``select.scoring.embeddings``).

    Raises:
        UserError: nothing has been labelled yet, or there is no such model.
    """
    turn = Turn(workspace, config, 0, in_round=False)
    records = turn.dataset(labelled_dataset(turn)).records
    embedder = config.select.scoring.embeddings if embedder is None else embedder
    if embedder == CHAMPION:
        found = embed_records(turn.model(Registry(workspace).in_service), records)
    else:
        found = by_sentences(records, embedder)
    return found, records["completion"].to_pylist()


def labelled_in(files: Sequence[Path], columns: Mapping[str, str] | None, embedder: str) -> Embedded:
    """The same of files, by a sentence-embedding model.

    Raises:
        UserError: a file cannot be read or has no answers, or there is no such model.
    """
    records = labelled_records(files, columns)
    return by_sentences(records, embedder), records["completion"].to_pylist()
