"""Scores of training records for test records, and what they add up to."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from posttrain.select.value.values import Values


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
