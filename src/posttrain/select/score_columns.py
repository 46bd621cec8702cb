"""The columns of a score table as strategies take them."""

import numpy as np
import pyarrow as pa

from posttrain.select.scores.names import BASE, DOUBT
from posttrain.select.selectors.pool import Column

Columns = dict[str, Column]

_ALWAYS = (*BASE, "cost", "source", "predicted", "runner_up")


def score_columns(scores: pa.Table) -> Columns:
    """Arrays by name: one of N numbers or texts for each column, ``embeddings`` [N, D], ``probabilities`` [N, K]."""
    further = [name for name in scores.column_names if name in DOUBT and name not in _ALWAYS]
    columns = {name: scores[name].to_numpy() for name in (*_ALWAYS, *further)}
    columns["embeddings"] = _matrix(scores, "embedding")
    if "probabilities" in scores.column_names:
        columns["probabilities"] = _matrix(scores, "probabilities")
    return columns


def with_labelled(columns: Columns, labelled: np.ndarray) -> Columns:
    """The columns with rows for labelled records below, of which nothing is known but where they lie.

    Args:
        columns: of N records.
        labelled: float [L, D], their embeddings.
    """
    count = len(labelled)
    found = {}
    for name, values in columns.items():
        if name == "embeddings":
            below = labelled
        elif name == "probabilities":
            below = np.full((count, values.shape[1]), 1 / values.shape[1])
        else:
            below = np.full(count, "" if values.dtype == object else np.nan, values.dtype)
        found[name] = np.concatenate([values, below.astype(values.dtype)])
    return found


def _matrix(scores: pa.Table, name: str) -> np.ndarray:
    width = scores.schema.field(name).type.list_size
    values: np.ndarray = scores[name].combine_chunks().flatten().to_numpy().reshape(-1, width)
    return values
