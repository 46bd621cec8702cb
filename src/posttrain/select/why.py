"""Why each record of a batch was chosen, in words."""

import math

import numpy as np
import numpy.typing as npt

from posttrain.select.scores.names import DOUBT
from posttrain.select.selectors.closeness import Floats, Rows, blocks


def by_doubt(name: str, values: npt.NDArray[np.floating], rows: Rows, asked: npt.NDArray[np.bool_]) -> list[str | None]:
    """How a score of each row compares with the pool's, such as ``entropy 1.21, in the top 6% of the pool``.

    Args:
        name: of the score; where a small one means doubt, it is the bottom.
        values: float [N].
        rows: int64 [M].
        asked: bool [N], of which rows it is the champion's word, and not its neighbours'.

    Returns:
        [M] sentences; None where the score is not known.
    """
    doubt = np.asarray(values, np.float64) * DOUBT[name]
    known = np.sort(doubt[np.isfinite(doubt)])
    side = "top" if DOUBT[name] > 0 else "bottom"
    found: list[str | None] = []
    for row in rows:
        if np.isfinite(doubt[row]):
            at_least = len(known) - np.searchsorted(known, doubt[row])
            share = math.ceil(100 * at_least / len(known))
            about = "" if asked[row] else "about "
            found.append(f"{name} {about}{values[row]:.2f}, in the {side} {share}% of the pool")
        else:
            found.append(None)
    return found


def by_cover(points: Floats, rows: Rows, count: int) -> list[str]:
    """For how many records of the pool each row is the nearest of the batch.

    Args:
        points: float32 [P, d], rows of length 1.
        rows: int64 [M], the batch.
        count: the first N points are the pool.
    """
    nearest = np.concatenate([(points[:count][part] @ points[rows].T).argmax(axis=1) for part in blocks(count)])
    nearest[rows] = np.arange(len(rows))  # each covers itself, whatever its twin
    others = np.bincount(nearest, minlength=len(rows)) - 1
    return [_covering(number) for number in others.tolist()]


def _covering(number: int) -> str:
    if not number:
        return "stands alone"
    return f"nearest chosen record of {number} other{'' if number == 1 else 's'}"


def weak_class(
    predicted: str | None, runner_up: str | None, worst_classes: frozenset[str], *, asked: bool
) -> str | None:
    """Which weak class a record may be of, by the champion's word or, where it was not asked, by its neighbours'."""
    named = [name for name in (predicted, runner_up) if name in worst_classes]
    who = "may" if asked else "like its neighbours may"
    return f"{who} be `{named[0]}`, a class with poor results" if named else None


def together(*facts: str | None) -> str:
    """Facts as one line."""
    return "; ".join(fact for fact in facts if fact)
