"""Probabilities that are as high as they are right: one temperature, fitted to held-out answers."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.optimize import minimize_scalar
from scipy.special import log_softmax

Floats = npt.NDArray[np.float64]

CalibrationError = Callable[[Floats, Floats], float]
"""Expected calibration error of confidences [N] and whether each answer is right [N]."""

LEAST_RECORDS = 30
_LOWEST, _HIGHEST = 0.05, 20.0  # of temperatures: answers that are all right would ask for 0
_FOLDS = 5


@dataclass(frozen=True)
class Calibration:
    """What calibration found.

    Attributes:
        temperature: by which log-probabilities are divided; 1 where the error would not fall.
        ece_before: expected calibration error of the model as it is, 15 equal-width bins.
        ece_after: of the calibrated model, each record with a temperature that was fitted to others.
        records: it was fitted to so many.
    """

    temperature: float
    ece_before: float
    ece_after: float
    records: int


def at_temperature(log_probabilities: npt.ArrayLike, temperature: float) -> Floats:
    """Log-probabilities [N, K] divided by a temperature and normalised again: float64 [N, K]."""
    logs = np.asarray(log_probabilities, np.float64)
    if temperature == 1.0:
        return logs
    found: Floats = log_softmax(logs / temperature, axis=1)
    return found


def fit_temperature(log_probabilities: npt.ArrayLike, truth: npt.ArrayLike) -> float:
    """The temperature with the least negative log-likelihood, between 0.05 and 20.

    C. Guo et al., On Calibration of Modern Neural Networks, ICML 2017 (arXiv:1706.04599), section 4.2. The likelihood
    is convex in the inverse of the temperature, so that its minimum is the only one.

    Args:
        log_probabilities: float [N, K], N >= 1, of records that the model was not trained on.
        truth: int [N], the right labels.
    """
    logs, right = np.asarray(log_probabilities, np.float64), np.asarray(truth, np.int64)
    rows = np.arange(len(right))

    def loss(inverse: float) -> float:
        return float(-log_softmax(logs * inverse, axis=1)[rows, right].sum())

    found = minimize_scalar(loss, bounds=(1 / _HIGHEST, 1 / _LOWEST), method="bounded", options={"xatol": 1e-6})
    return float(1 / found.x)


def calibrate(log_probabilities: npt.ArrayLike, truth: npt.ArrayLike, error: CalibrationError) -> Calibration | None:
    """Fit a temperature, and say what it is worth.

    Args:
        log_probabilities: float [N, K] of held-out records.
        truth: int [N], the right labels.
        error: the expected calibration error with 15 bins.

    Returns:
        None for fewer than 30 records, which say too little.
    """
    logs, right = np.asarray(log_probabilities, np.float64), np.asarray(truth, np.int64)
    if len(right) < LEAST_RECORDS:
        return None
    correct = (logs.argmax(axis=1) == right).astype(np.float64)
    fold = np.arange(len(right)) % _FOLDS
    after = np.empty(len(right))
    for number in range(_FOLDS):
        theirs = fit_temperature(logs[fold != number], right[fold != number])
        after[fold == number] = _confidence(at_temperature(logs[fold == number], theirs))
    errors = error(_confidence(logs), correct), error(after, correct)
    # The likelihood is led by the worst answers, and may spread where confidence was right on the whole.
    temperature = fit_temperature(logs, right) if errors[1] < errors[0] else 1.0
    return Calibration(temperature, *errors, len(right))


def _confidence(log_probabilities: Floats) -> Floats:
    found: Floats = np.minimum(np.exp(log_probabilities.max(axis=1)), 1.0)
    return found
