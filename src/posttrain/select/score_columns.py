"""Turns a score table into arrays, and imputes the scores of unscored records from their nearest neighbours."""

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from posttrain.select.scores.registry import BASE_MEASURES, uncertainty_sign
from posttrain.select.selectors.pool import Column
from posttrain.select.selectors.similarity import Floats, Rows, blocks

Columns = dict[str, Column]

_BASE_COLUMNS = (*BASE_MEASURES, "predicted", "runner_up")

KNN_NEIGHBOURS = 5
"""Neighbours that are averaged. Scores of 1,200 of Banking77's 10,003 records choose as well as scores of all of them
(see BENCHMARKS.md); 10 neighbours do worse by 0.003 in mean accuracy."""

_PAIRS_PER_BLOCK = 1 << 22  # pairs of records that are compared at a time


def score_columns(scores: pa.Table) -> Columns:
    """Returns arrays by name: N numbers or texts for each column, ``embeddings`` [N, D], ``probabilities`` [N, K]."""
    extra = [name for name in scores.column_names if name not in _BASE_COLUMNS and uncertainty_sign(name)]
    columns = {name: scores[name].to_numpy() for name in (*_BASE_COLUMNS, *extra)}
    columns["embeddings"] = _list_matrix(scores, "embedding")
    if "probabilities" in scores.column_names:
        columns["probabilities"] = _list_matrix(scores, "probabilities")
    return columns


def with_labelled(columns: Columns, labelled: np.ndarray) -> Columns:
    """Appends rows for labelled records, which have an embedding and no scores.

    Args:
        columns: columns of N records.
        labelled: float [L, D], their embeddings.
    """
    count = len(labelled)
    extended = {}
    for name, values in columns.items():
        if name == "embeddings":
            below = labelled
        elif name == "probabilities":
            # Uniform, not NaN: a single NaN would spread through BADGE's cumulative sums.
            below = np.full((count, values.shape[1]), 1 / values.shape[1])
        else:
            below = np.full(count, "" if values.dtype == object else np.nan, values.dtype)
        extended[name] = np.concatenate([values, below.astype(values.dtype)])
    return extended


def _list_matrix(scores: pa.Table, name: str) -> np.ndarray:
    width = scores.schema.field(name).type.list_size
    values: np.ndarray = scores[name].combine_chunks().flatten().to_numpy().reshape(-1, width)
    return values


def knn_impute(columns: Columns, is_scored: npt.NDArray[np.bool_], points: Floats) -> Columns:
    """Imputes the scores of unscored records from their nearest scored neighbours.

    A number, or a probability, is the mean over those of the `KNN_NEIGHBOURS` nearest scored records by cosine that
    have one; a text is that of the nearest. Columns that every record has, such as source and cost, stay.

    Args:
        columns: columns of N records.
        is_scored: bool [N], at least one.
        points: float32 [N, d], rows of length 1 (see `whiten`).
    """
    rows = np.flatnonzero(~is_scored)
    nearest = _nearest_scored(points, rows, np.flatnonzero(is_scored))
    imputed = {}
    for name, values in columns.items():
        filled = values
        if name != "embeddings":
            filled = values.copy()
            filled[rows] = values[nearest[:, 0]] if values.dtype == object else _finite_means(values, nearest)
        imputed[name] = filled
    return imputed


def _finite_means(values: npt.NDArray[np.floating], nearest: Rows) -> npt.NDArray[np.floating]:
    """Averages, for each row of ``nearest``, the finite values; NaN where there is none."""
    total = np.zeros((len(nearest), *values.shape[1:]), values.dtype)
    count = np.zeros_like(total)
    # A neighbour at a time: all k at once would take k times the memory of the probabilities.
    for column in nearest.T:
        neighbour = values[column]
        finite = np.isfinite(neighbour)
        total += np.where(finite, neighbour, 0)
        count += finite
    means: npt.NDArray[np.floating] = np.divide(total, count, out=np.full_like(total, np.nan), where=count > 0)
    return means


def _nearest_scored(points: Floats, rows: Rows, scored: Rows) -> Rows:
    """Returns the nearest scored rows of each row, int64 [M, k], the nearest first."""
    count = min(KNN_NEIGHBOURS, len(scored))
    negated = -points[scored].T
    nearest = np.empty((len(rows), count), np.int64)
    for part in blocks(len(rows), max(1, _PAIRS_PER_BLOCK // len(scored))):
        distances = points[rows[part]] @ negated
        best = np.argpartition(distances, count - 1, axis=1)[:, :count]
        # By distance, then by row: argpartition leaves its first k in any order, and ties must not depend on it.
        order = np.lexsort((best, np.take_along_axis(distances, best, axis=1)), axis=1)
        nearest[part] = scored[np.take_along_axis(best, order, axis=1)]
    return nearest
