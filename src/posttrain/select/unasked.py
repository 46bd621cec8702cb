"""Records that lie in the pool without the champion having been asked: those nearest to them speak for them."""

import numpy as np
import numpy.typing as npt

from posttrain.select.score_columns import Columns
from posttrain.select.selectors.closeness import Floats, Rows, blocks

NEAREST = 5
"""Neighbours that are averaged. The doubts of 1,200 asked records of Banking77's 10,003 choose as well as everybody's
(see BENCHMARKS.md); 10 neighbours do worse by 0.003 in mean accuracy."""


def told_by_neighbours(columns: Columns, asked: npt.NDArray[np.bool_], points: Floats) -> Columns:
    """The columns with what nobody asked filled in.

    A number, or a probability, is the mean over those of the `NEAREST` asked records by cosine that have one, a word
    the nearest one's. What is known of every record, such as its source and cost, stays.

    Args:
        columns: of N records.
        asked: bool [N], at least one.
        points: float32 [N, d], rows of length 1 (see `whiten`).
    """
    rows, known = np.flatnonzero(~asked), np.flatnonzero(asked)
    near = _nearest(points, rows, known)
    found = {}
    for name, values in columns.items():
        filled = values
        if name not in _OF_EVERYBODY:
            filled = values.copy()
            filled[rows] = values[near[:, 0]] if values.dtype == object else _mean(values, near)
        found[name] = filled
    return found


_AT_ONCE = 1 << 22  # pairs of records that are compared at a time
_OF_EVERYBODY = ("embeddings", "source", "cost")


def _mean(values: npt.NDArray[np.floating], near: Rows) -> npt.NDArray[np.floating]:
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


def _nearest(points: Floats, rows: Rows, known: Rows) -> Rows:
    """Of each row the nearest known ones, int64 [M, k], the nearest first."""
    count = min(NEAREST, len(known))
    theirs = -points[known].T
    found = np.empty((len(rows), count), np.int64)
    for part in blocks(len(rows), max(1, _AT_ONCE // len(known))):
        unlike = points[rows[part]] @ theirs
        best = np.argpartition(unlike, count - 1, axis=1)[:, :count]
        order = np.lexsort((best, np.take_along_axis(unlike, best, axis=1)), axis=1)
        found[part] = known[np.take_along_axis(best, order, axis=1)]
    return found
