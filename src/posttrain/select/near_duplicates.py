"""Records of one batch that nearly say the same: the second teaches little and costs a label all the same."""

import numpy as np
import numpy.typing as npt

from posttrain.select.selectors.closeness import Floats, Rows


def near_duplicates(points: Floats, rows: Rows, beside: Rows, cosine: float) -> npt.NDArray[np.bool_]:
    """Which of some rows lie as near as ``cosine`` to one of ``beside``, or to an earlier one that does not.

    Args:
        points: float32 [N, d], rows of length 1 (see `whiten`).
        rows: int64 [M], in the order in which they count.
        beside: int64 [B], rows that are taken already.
        cosine: from 0 to 1. Of Banking77 and of the demo's messages, four in five pairs above 0.9 share most of their
            words in order, and the others put the same question in other words.

    Returns:
        bool [M].
    """
    repeats = np.zeros(len(rows), bool)
    if len(beside):
        repeats = (points[rows] @ points[beside].T).max(axis=1) >= cosine
    among = points[rows] @ points[rows].T >= cosine
    for place in range(len(rows)):
        repeats[place] |= bool((among[place, :place] & ~repeats[:place]).any())
    return repeats
