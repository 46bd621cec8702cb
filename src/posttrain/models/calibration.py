"""Calibrates confidences by one temperature, and measures their error; evaluation, scores and classifiers share it."""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

MIN_TEMPERATURE, MAX_TEMPERATURE = 0.05, 20.0
"""Bounds of a fit: answers that are all right would ask for a temperature of 0."""


def expected_calibration_error(confidence: np.ndarray, correct: np.ndarray, bins: int = 15) -> float:
    """Computes the mean gap between confidence and accuracy over equal-width bins, weighted by their sizes.

    Source: C. Guo et al., On Calibration of Modern Neural Networks, ICML 2017, equation 3; M. P. Naeini, G. Cooper and
    M. Hauskrecht, Obtaining Well Calibrated Probabilities Using Bayesian Binning, AAAI 2015.

    Args:
        confidence: float [N] in [0, 1].
        correct: bool or 0/1 [N].
        bins: number of bins; bin m holds the confidences in ((m - 1) / bins, m / bins].

    Returns:
        A number in [0, 1]; 0 for N = 0.
    """
    if len(confidence) == 0:
        return 0.0
    index = np.clip(np.ceil(np.asarray(confidence, np.float64) * bins).astype(int) - 1, 0, bins - 1)
    # |sum conf - sum acc| of a bin is its size times |mean conf - mean acc|, so no bin needs a division.
    gaps = np.bincount(index, np.asarray(confidence, np.float64) - np.asarray(correct, np.float64), minlength=bins)
    return float(np.abs(gaps).sum() / len(confidence))


def at_temperature(log_probabilities: npt.ArrayLike, temperature: float) -> Floats:
    """Divides log-probabilities [N, K] by a temperature and normalises them again: float64 [N, K]."""
    logs = np.asarray(log_probabilities, np.float64)
    # Unchanged to the last digit: without calibration the scores must be the model's own.
    if temperature == 1.0:
        return logs
    from scipy.special import log_softmax

    scaled: Floats = log_softmax(logs / temperature, axis=1)
    return scaled


def fit_temperature(log_probabilities: npt.ArrayLike, truth: npt.ArrayLike) -> float:
    """Returns the temperature with the least negative log-likelihood, between 0.05 and 20.

    C. Guo et al., On Calibration of Modern Neural Networks, ICML 2017 (arXiv:1706.04599), section 4.2.

    Args:
        log_probabilities: float [N, K], N >= 1, of records that the model was not trained on.
        truth: int [N], the right labels.
    """
    from scipy.special import log_softmax

    logs, right = np.asarray(log_probabilities, np.float64), np.asarray(truth, np.int64)
    rows = np.arange(len(right))

    # By the inverse of the temperature, in which the loss is convex: a bounded search finds its only minimum.
    def loss(inverse: float) -> float:
        return float(-log_softmax(logs * inverse, axis=1)[rows, right].sum())

    return 1 / minimum(loss, 1 / MAX_TEMPERATURE, 1 / MIN_TEMPERATURE)


def minimum(loss: Callable[[float], float], low: float, high: float) -> float:
    """Returns the argument between two bounds at which a convex loss is least."""
    # On use: importing scipy's optimisers takes a third of a second, and finished scores need no fit.
    from scipy.optimize import minimize_scalar

    return float(minimize_scalar(loss, bounds=(low, high), method="bounded", options={"xatol": 1e-6}).x)


def calibrate_confidence(confidence: npt.ArrayLike, held_out: npt.ArrayLike, right: npt.ArrayLike) -> Floats:
    """Maps confidences to shares of right answers, by isotonic regression on held-out answers: float64 [N].

    B. Zadrozny and C. Elkan, Transforming Classifier Scores into Accurate Multiclass Probability Estimates, KDD 2002.

    Args:
        confidence: float [N], in any unit that grows with the chance to be right.
        held_out: float [M], M >= 1, of the answers to fit.
        right: bool [M].
    """
    from sklearn.isotonic import IsotonicRegression

    model = IsotonicRegression(y_min=0.0, y_max=1.0, out_of_bounds="clip")
    model.fit(np.asarray(held_out, np.float64), np.asarray(right, np.float64))
    calibrated: Floats = np.asarray(model.predict(np.asarray(confidence, np.float64)), np.float64)
    return calibrated
