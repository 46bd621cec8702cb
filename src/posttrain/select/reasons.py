"""Explains in words why each record of a batch was chosen."""

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from posttrain.select.hard_cases import HardCase
from posttrain.select.scores.registry import UNCERTAINTY_SIGN
from posttrain.select.selectors.similarity import Floats, Rows, blocks

_KIND_PHRASES = {
    "wrong": "answered wrongly",
    "high_loss": "of high loss",
    "regressions": "which the champion before answered rightly",
    "disagreement": "which two models answer differently",
}


def uncertainty_reasons(
    name: str, values: npt.NDArray[np.floating], rows: Rows, asked: npt.NDArray[np.bool_]
) -> list[str | None]:
    """How a score of each row compares with the pool's, such as ``entropy 1.21, in the top 6% of the pool``.

    Args:
        name: of the score; where a small one means doubt, it is the bottom.
        values: float [N].
        rows: int64 [M].
        asked: bool [N], of which rows it is the champion's word, and not its neighbours'.

    Returns:
        [M] sentences; None where the score is not known.
    """
    doubt = np.asarray(values, np.float64) * UNCERTAINTY_SIGN[name]
    known = np.sort(doubt[np.isfinite(doubt)])
    side = "top" if UNCERTAINTY_SIGN[name] > 0 else "bottom"
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


def coverage_reasons(points: Floats, rows: Rows, count: int) -> list[str]:
    """For how many records of the pool each row is the nearest of the batch.

    Args:
        points: float32 [P, d], rows of length 1.
        rows: int64 [M], the batch.
        count: the first N points are the pool.
    """
    nearest = np.concatenate([(points[:count][part] @ points[rows].T).argmax(axis=1) for part in blocks(count)])
    nearest[rows] = np.arange(len(rows))  # each covers itself, whatever its twin
    others = np.bincount(nearest, minlength=len(rows)) - 1
    return [_coverage_reason(number) for number in others.tolist()]


def _coverage_reason(number: int) -> str:
    if not number:
        return "stands alone"
    return f"nearest chosen record of {number} other{'' if number == 1 else 's'}"


def weak_class_reason(
    predicted: str | None, runner_up: str | None, worst_classes: frozenset[str], *, asked: bool
) -> str | None:
    """Which weak class a record may be of, by the champion's word or, where it was not asked, by its neighbours'."""
    named = [name for name in (predicted, runner_up) if name in worst_classes]
    who = "may" if asked else "like its neighbours may"
    return f"{who} be `{named[0]}`, a class with poor results" if named else None


def join_reasons(*facts: str | None) -> str:
    """Facts as one line."""
    return "; ".join(fact for fact in facts if fact)


def hard_case_reasons(nearest: npt.NDArray[np.int64], cases: Sequence[HardCase]) -> list[str | None]:
    """Which hard case a pool record was chosen for, in words.

    Args:
        nearest: int64 [N], from `nearest_hard_case`.
        cases: H hard cases, in the order of their embeddings.

    Returns:
        N sentences, such as ``near test record 3fa2, answered wrongly (`cash` for `card`)``; None for what is near
        none.
    """
    said = [_hard_case_reason(case) for case in cases]
    return [None if case < 0 else said[case] for case in nearest.tolist()]


def _hard_case_reason(case: HardCase) -> str:
    told = f"near test record {case.id}, {' and '.join(_KIND_PHRASES[kind] for kind in case.kinds)}"
    if "wrong" in case.kinds and case.expected and case.predicted is not None:
        told += f" (`{case.predicted[:40]}` for `{case.expected[:40]}`)"
    return told
