"""The calibration error of confidences, which evaluation, scores and text classifiers measure."""

import numpy as np


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
