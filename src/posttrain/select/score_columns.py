"""Turns a score table into arrays, and imputes the scores of unscored records from their nearest neighbours."""

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from posttrain.select.scores.registry import BASE_MEASURES, UNCERTAINTY_SIGN
from posttrain.select.selectors.pool import Column
from posttrain.select.selectors.similarity import Floats, Rows, blocks

Columns = dict[str, Column]

_BASE_COLUMNS = (*BASE_MEASURES, "cost", "source", "predicted", "runner_up")

KNN_NEIGHBOURS = 5
"""Neighbours that are averaged. The doubts of 1,200 asked records of Banking77's 10,003 choose as well as everybody's
(see BENCHMARKS.md); 10 neighbours do worse by 0.003 in mean accuracy."""

_PAIRS_PER_BLOCK = 1 << 22  # pairs of records that are compared at a time

_ALWAYS_KNOWN = ("embeddings", "source", "cost")


def score_columns(scores: pa.Table) -> Columns:
    """Arrays by name: one of N numbers or texts for each column, ``embeddings`` [N, D], ``probabilities`` [N, K]."""
    further = [name for name in scores.column_names if name in UNCERTAINTY_SIGN and name not in _BASE_COLUMNS]
    columns = {name: scores[name].to_numpy() for name in (*_BASE_COLUMNS, *further)}
    columns["embeddings"] = _embedding_matrix(scores, "embedding")
    if "probabilities" in scores.column_names:
        columns["probabilities"] = _embedding_matrix(scores, "probabilities")
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


def _embedding_matrix(scores: pa.Table, name: str) -> np.ndarray:
    width = scores.schema.field(name).type.list_size
    values: np.ndarray = scores[name].combine_chunks().flatten().to_numpy().reshape(-1, width)
    return values


def knn_impute(columns: Columns, asked: npt.NDArray[np.bool_], points: Floats) -> Columns:
    """The columns with what nobody asked filled in.

    A number, or a probability, is the mean over those of the `KNN_NEIGHBOURS` asked records by cosine that have one, a word
    the nearest one's. What is known of every record, such as its source and cost, stays.

    Args:
        columns: of N records.
        asked: bool [N], at least one.
        points: float32 [N, d], rows of length 1 (see `whiten`).
    """
    rows, known = np.flatnonzero(~asked), np.flatnonzero(asked)
    near = _nearest_known(points, rows, known)
    found = {}
    for name, values in columns.items():
        filled = values
        if name not in _ALWAYS_KNOWN:
            filled = values.copy()
            filled[rows] = values[near[:, 0]] if values.dtype == object else _mean_of_known(values, near)
        found[name] = filled
    return found


def _mean_of_known(values: npt.NDArray[np.floating], near: Rows) -> npt.NDArray[np.floating]:
    """Of each row of ``near`` the mean over those of which a number is known; NaN where it is of none."""
    total = np.zeros((len(near), *values.shape[1:]), values.dtype)
    count = np.zeros_like(total)
    for column in near.T:
        some = values[column]
        known = np.isfinite(some)
        total += np.where(known, some, 0)
        count += known
    found: npt.NDArray[np.floating] = np.divide(total, count, out=np.full_like(total, np.nan), where=count > 0)
    return found


def _nearest_known(points: Floats, rows: Rows, known: Rows) -> Rows:
    """Of each row the nearest known ones, int64 [M, k], the nearest first."""
    count = min(KNN_NEIGHBOURS, len(known))
    theirs = -points[known].T
    found = np.empty((len(rows), count), np.int64)
    for part in blocks(len(rows), max(1, _PAIRS_PER_BLOCK // len(known))):
        unlike = points[rows[part]] @ theirs
        best = np.argpartition(unlike, count - 1, axis=1)[:, :count]
        order = np.lexsort((best, np.take_along_axis(unlike, best, axis=1)), axis=1)
        found[part] = known[np.take_along_axis(best, order, axis=1)]
    return found
