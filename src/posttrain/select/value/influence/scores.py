"""Scores of training records for test records, and what they add up to."""

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from posttrain.select.value.values import Values
from posttrain.store.errors import UserError


@dataclass(frozen=True)
class Scores:
    """What each training record does for each test record; positive where training on it helps.

    Attributes:
        scores: float64 [N, M].
        evaluations: gradients of single records that were computed, and products of one record's curvature with one
            vector.
        residuals: float64 [M] of an inverse that was solved for, ``|(H + damping) x - b| / |b|`` a test record; else
            None.
        by_model: float64 [E, N], each model's scores added up over the test records, where E models were averaged;
            else None.
    """

    scores: npt.NDArray[np.float64]
    evaluations: int
    residuals: npt.NDArray[np.float64] | None = None
    by_model: npt.NDArray[np.float64] | None = None


def values(found: Scores) -> Values:
    """The value of each training record: its scores added up over the test records.

    The standard errors are over the models, of their mean, where several were averaged. Otherwise they are over the
    test records, as a random draw of M from many: sqrt(M) times the standard deviation of a row's scores; NaN for one
    test record.
    """
    if found.by_model is not None and len(found.by_model) > 1:
        errors = found.by_model.std(axis=0, ddof=1) / np.sqrt(len(found.by_model))
    else:
        errors = spread_of_sums(found.scores)
    return Values(found.scores.sum(axis=1), errors, found.evaluations)


def spread_of_sums(scores: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Standard error [N] of each row's sum of scores [N, M] over the columns as a random draw; NaN for one column."""
    columns = scores.shape[1]
    if columns < 2:
        return np.full(len(scores), np.nan)
    spread: npt.NDArray[np.float64] = np.sqrt(columns) * scores.std(axis=1, ddof=1)
    return spread


def most_influential(
    scores: npt.NDArray[np.float64], test_row: int, k: int, which: Literal["helpful", "harmful", "either"] = "helpful"
) -> npt.NDArray[np.int64]:
    """The training records that did most for, or against, one test record.

    A model's own wrong answer, taken as a test record, is explained by its most helpful training records: they made
    this answer likely.

    Args:
        scores: float [N, M].
        test_row: column of ``scores``.
        k: how many; all when there are fewer.
        which: ``helpful``: highest scores first; ``harmful``: lowest first; ``either``: farthest from 0 first.

    Returns:
        int64 [min(k, N)] rows; of equal scores the earlier row comes first.

    Raises:
        UserError: there is no such test record, or k is less than 1.
    """
    if not 0 <= test_row < scores.shape[1]:
        raise UserError(f"there is no test record {test_row} among {scores.shape[1]}", where="influence")
    if k < 1:
        raise UserError(f"at least one record is to be named, not {k}", where="influence")
    column = scores[:, test_row]
    rank = {"helpful": -column, "harmful": column, "either": -np.abs(column)}[which]
    return np.argsort(rank, kind="stable")[:k].astype(np.int64)
