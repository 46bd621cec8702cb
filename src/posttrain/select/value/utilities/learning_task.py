"""The data of a utility: rows to learn from and rows to evaluate on."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from posttrain.select.value.utilities.utility import Floats
from posttrain.store.errors import UserError
from posttrain.store.hashing import digest


@dataclass(frozen=True)
class LearningTask:
    """Checked features and numbered labels.

    Attributes:
        features: float64 [N, D] of the training rows.
        labels: int64 [N] in 0..K-1, by the sorted order of the labels given.
        evaluation_features: float64 [M, D].
        evaluation_labels: int64 [M].
        classes: K.
    """

    features: Floats
    labels: npt.NDArray[np.int64]
    evaluation_features: Floats
    evaluation_labels: npt.NDArray[np.int64]
    classes: int

    def key(self, *settings: str | int | float | None) -> str:
        """64 hex characters that depend on the data and the settings."""
        arrays = (self.features, self.labels, self.evaluation_features, self.evaluation_labels)
        hashes = [hashlib.sha256(np.ascontiguousarray(array).data).hexdigest() for array in arrays]
        return digest([list(self.features.shape), list(self.evaluation_features.shape), hashes, list(settings)])


def learning_task(
    features: npt.ArrayLike,
    labels: Sequence[Any] | npt.NDArray[Any],
    evaluation_features: npt.ArrayLike,
    evaluation_labels: Sequence[Any] | npt.NDArray[Any],
) -> LearningTask:
    """Check the data and number the labels.

    Args:
        features: [N, D] of the training rows, N and D at least 1.
        labels: [N], anything that can be sorted.
        evaluation_features: [M, D], M at least 1.
        evaluation_labels: [M].

    Raises:
        UserError: shapes do not fit, a feature is not finite, or a class occurs in only one of training and evaluation.
    """
    trained, evaluated = (
        check_features("features", features),
        check_features("evaluation_features", evaluation_features),
    )
    if trained.shape[1] != evaluated.shape[1]:
        raise UserError(f"features have {trained.shape[1]} columns, evaluation_features {evaluated.shape[1]}")
    given = check_labels("labels", labels, len(trained))
    true = check_labels("evaluation_labels", evaluation_labels, len(evaluated))
    names, numbers = np.unique(given, return_inverse=True)
    found = np.unique(true)
    if len(missing := np.setdiff1d(names, found)):
        raise UserError(
            f"class {missing.tolist()[0]!r} has no evaluation record",
            fix="add some, or leave its training records out: they could have no value",
        )
    if len(unknown := np.setdiff1d(found, names)):
        raise UserError(f"class {unknown.tolist()[0]!r} of the evaluation has no training record")
    places = np.searchsorted(names, true)
    return LearningTask(trained, numbers.astype(np.int64), evaluated, places.astype(np.int64), len(names))


def check_features(name: str, given: npt.ArrayLike) -> Floats:
    """Features as float64 [N, D]; raises a UserError where they are none."""
    values = np.ascontiguousarray(given, dtype=np.float64)
    if values.ndim != 2 or 0 in values.shape:
        raise UserError(f"{name} must be rows by columns, at least one of each; the shape is {values.shape}")
    if not np.isfinite(values).all():
        row = int(np.flatnonzero(~np.isfinite(values).all(axis=1))[0])
        raise UserError(f"{name} has a value that is not finite, first in row {row}")
    return values


def check_labels(name: str, given: Sequence[Any] | npt.NDArray[Any], rows: int) -> npt.NDArray[Any]:
    """Labels as an array [N]; raises a UserError where they are none."""
    values = np.asarray(given)
    if values.shape != (rows,):
        raise UserError(f"{name} must have one label for each of {rows} rows; the shape is {values.shape}")
    if values.dtype.kind == "f" and not np.isfinite(values).all():
        raise UserError(f"{name} has a value that is not finite")
    return values
