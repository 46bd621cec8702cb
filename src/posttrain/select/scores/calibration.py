"""Confidence that is as high as the answers are right: one temperature, fitted to held-out answers."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.optimize import minimize_scalar
from scipy.special import log_softmax

Floats = npt.NDArray[np.float64]
Rows = npt.NDArray[np.bool_]

CalibrationError = Callable[[Floats, Floats], float]
"""Expected calibration error of confidences [N] and whether each answer is right [N]."""

LEAST_RECORDS = 30
_LOWEST, _HIGHEST = 0.05, 20.0  # of temperatures: answers that are all right would ask for 0
_LOWEST_OF_ANSWERS = 1e-3  # long answers are wrong though each of their tokens is all but sure
_LEAST_SURPRISAL = 1e-9
_FOLDS = 5


@dataclass(frozen=True)
class Calibration:
    """What calibration found.

    Attributes:
        temperature: by which log-probabilities are divided, of labels or of an answer per token; 1 where the error
            would not fall.
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
    return _cross_fitted(
        lambda rows: fit_temperature(logs[rows], right[rows]),
        lambda rows, temperature: _confidence(at_temperature(logs[rows], temperature)),
        (logs.argmax(axis=1) == right).astype(np.float64),
        error,
    )


def answer_confidence(surprisal: npt.ArrayLike, temperature: float) -> Floats:
    """exp(-surprisal / temperature) of written answers: float64 [N] in [0, 1].

    Args:
        surprisal: float [N] >= 0, nats a token.
        temperature: 1 gives the geometric mean of the tokens' probabilities.
    """
    found: Floats = np.exp(-np.asarray(surprisal, np.float64) / temperature)
    return found


def fit_answer_temperature(surprisal: npt.ArrayLike, score: npt.ArrayLike) -> float:
    """The temperature at which `answer_confidence` foretells best which answers are right, between 0.001 and 20.

    What is least is the cross-entropy of the answers' scores, -s ln c - (1 - s) ln(1 - c), which is convex in the
    inverse of the temperature.

    Args:
        surprisal: float [N], N >= 1, of answers to records that the model was not trained on.
        score: float [N] in [0, 1], 1 for a right answer.
    """
    nats = np.maximum(np.asarray(surprisal, np.float64), _LEAST_SURPRISAL)
    right = np.asarray(score, np.float64)

    def loss(log_inverse: float) -> float:
        scaled = nats * np.exp(log_inverse)
        return float((right * scaled - (1 - right) * np.log(-np.expm1(-scaled))).sum())

    bounds = (-np.log(_HIGHEST), -np.log(_LOWEST_OF_ANSWERS))
    found = minimize_scalar(loss, bounds=bounds, method="bounded", options={"xatol": 1e-6})
    return float(np.exp(-found.x))


def calibrate_answers(surprisal: npt.ArrayLike, score: npt.ArrayLike, error: CalibrationError) -> Calibration | None:
    """The same as `calibrate` for written answers.

    Args:
        surprisal: float [N] >= 0, nats a token, of answers to held-out records.
        score: float [N] in [0, 1], 1 for a right answer.
        error: the expected calibration error with 15 bins.

    Returns:
        None for fewer than 30 records, which say too little.
    """
    nats, right = np.asarray(surprisal, np.float64), np.asarray(score, np.float64)
    if len(right) < LEAST_RECORDS:
        return None
    return _cross_fitted(
        lambda rows: fit_answer_temperature(nats[rows], right[rows]),
        lambda rows, temperature: answer_confidence(nats[rows], temperature),
        right,
        error,
    )


def _cross_fitted(
    fit: Callable[[Rows], float],
    confidence: Callable[[Rows, float], Floats],
    right: Floats,
    error: CalibrationError,
) -> Calibration:
    """A temperature, and the errors before and after, each record's by a temperature that was fitted to others."""
    fold = np.arange(len(right)) % _FOLDS
    after = np.empty(len(right))
    for number in range(_FOLDS):
        after[fold == number] = confidence(fold == number, fit(fold != number))
    every = np.ones(len(right), bool)
    errors = error(confidence(every, 1.0), right), error(after, right)
    # The likelihood is led by the worst answers, and may spread where confidence was right on the whole.
    temperature = fit(every) if errors[1] < errors[0] else 1.0
    return Calibration(temperature, *errors, len(right))


def _confidence(log_probabilities: Floats) -> Floats:
    found: Floats = np.minimum(np.exp(log_probabilities.max(axis=1)), 1.0)
    return found
