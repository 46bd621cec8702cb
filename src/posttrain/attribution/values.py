"""The values of training records, and influence scores by test record."""

from dataclasses import dataclass
from typing import Self

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Values:
    """The value of each training record: its contribution to the utility of a model that is trained on it.

    Attributes:
        values: float64 [N] in the utility's unit; negative for a record that does harm.
        standard_errors: float64 [N] of the values, over the method's random draws; 0 for an exact value, NaN for too
            few draws.
        evaluations: computations of the utility, a whole training each unless the method says otherwise.
    """

    values: npt.NDArray[np.float64]
    standard_errors: npt.NDArray[np.float64]
    evaluations: int


@dataclass(frozen=True)
class InfluenceScores(Values):
    """Influence of each training record on each test record, and the sums; positive where training on it helps.

    Attributes:
        values: float64 [N], the sum of a record's scores over the test records.
        standard_errors: float64 [N], over the models, of their mean, where several were averaged. Otherwise over the
            test records, as a random draw of M from many: sqrt(M) times the standard deviation of a row's scores; NaN
            for one test record.
        evaluations: gradients of single records that were computed, and products of one record's curvature with one
            vector.
        scores: float64 [N, M].
        residuals: float64 [M] of an inverse that was solved for, ``|(H + damping) x - b| / |b|`` a test record; else
            None.
    """

    scores: Floats
    residuals: Floats | None = None

    @classmethod
    def from_scores(
        cls, scores: Floats, evaluations: int, *, residuals: Floats | None = None, by_model: Floats | None = None
    ) -> Self:
        """Adds the scores up over the test records.

        Args:
            scores, evaluations, residuals: as above.
            by_model: float64 [E, N], each model's scores added up over the test records, where E models were averaged.
        """
        if by_model is not None and len(by_model) > 1:
            errors = by_model.std(axis=0, ddof=1) / np.sqrt(len(by_model))
        else:
            errors = standard_errors_of_sums(scores)
        return cls(scores.sum(axis=1), errors, evaluations, scores, residuals)


def standard_errors_of_sums(scores: Floats) -> Floats:
    """Returns the standard errors [N] of the rows' sums of [N, M], whose columns are a random draw; NaN for one."""
    columns = scores.shape[1]
    if columns < 2:
        return np.full(len(scores), np.nan)
    spread: Floats = np.sqrt(columns) * scores.std(axis=1, ddof=1)
    return spread
