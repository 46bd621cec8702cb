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

    A number, or a probability, is the mean over the `NEAREST` asked records by cosine, a word the nearest one's. What
    is known of every record, such as its source and cost, stays.

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
            filled[rows] = values[near[:, 0]] if values.dtype == object else values[near].mean(axis=1)
        found[name] = filled
    return found


_OF_EVERYBODY = ("embeddings", "source", "cost")


def _nearest(points: Floats, rows: Rows, known: Rows) -> Rows:
    """Of each row the nearest known ones, int64 [M, k], the nearest first; of equal ones the earlier."""
    count = min(NEAREST, len(known))
    theirs = points[known].T
    found = np.empty((len(rows), count), np.int64)
    for part in blocks(len(rows)):
        like = points[rows[part]] @ theirs
        best = np.argpartition(-like, count - 1, axis=1)[:, :count]
        order = np.lexsort((best, -np.take_along_axis(like, best, axis=1)), axis=1)
        found[part] = known[np.take_along_axis(best, order, axis=1)]
    return found
