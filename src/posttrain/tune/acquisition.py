"""Acquisition functions: how much a trial promises, given the normal distribution of its loss.

Less is better. Improvements are computed as logarithms, which stay finite and differ where the values themselves
underflow: far from good points, and in products with probabilities.
"""

import math

import numpy as np

_LEAST_DEVIATION = 1e-10

_FAR = -1e3  # below it a difference of two numbers near 1 has lost its digits, and two terms of a series have all


def log_expected_improvement(mean: np.ndarray, deviation: np.ndarray, best: float) -> np.ndarray:
    """Returns log E[max(0, best - loss)], float64 [m] (Ament et al. 2023, arXiv:2310.20708, eq. 9).

    That is the logarithm of σ (φ(z) + z Φ(z)) with z = (best - mean) / σ.

    Args:
        mean, deviation: float64 [m], of the loss.
        best: least loss so far.
    """
    sigma = np.maximum(deviation, _LEAST_DEVIATION)
    logs: np.ndarray = _log_h((best - mean) / sigma) + np.log(sigma)
    return logs


def log_probability_of_improvement(mean: np.ndarray, deviation: np.ndarray, best: float) -> np.ndarray:
    """Returns log P(loss < best), float64 [m] (Kushner 1964)."""
    from scipy.special import log_ndtr

    logs: np.ndarray = log_ndtr((best - mean) / np.maximum(deviation, _LEAST_DEVIATION))
    return logs


def upper_confidence_bound(mean: np.ndarray, deviation: np.ndarray, beta: float) -> np.ndarray:
    """Returns √β σ - mean, float64 [m]: the bound of the negative loss (Srinivas et al. 2010, arXiv:0912.3995)."""
    bound: np.ndarray = math.sqrt(beta) * deviation - mean
    return bound


def confidence_weight(count: int, dimensions: int, delta: float = 0.1) -> float:
    """Returns β = 2/5 log(d t² π² / (6 δ)).

    That is theorem 1 of Srinivas et al. 2010, divided by 5 as in their experiments and those of Makarova et al. 2022
    (arXiv:2104.08166).

    Args:
        count: t, the trials so far.
        dimensions: d.
        delta: probability that the bounds do not hold, δ.
    """
    return 0.4 * math.log(max(1, dimensions) * max(1, count) ** 2 * math.pi**2 / (6 * delta))


def _log_h(z: np.ndarray) -> np.ndarray:
    """Returns log(φ(z) + z Φ(z))."""
    from scipy.special import erfcx, ndtr

    result = np.empty_like(z, dtype=np.float64)
    near, far = z > -1, z < _FAR
    at = z[near]
    result[near] = np.log(np.exp(-0.5 * at**2) / math.sqrt(2 * math.pi) + at * ndtr(at))
    at = z[~near & ~far]
    ratio = np.log(erfcx(-at / math.sqrt(2)) * -at) + 0.5 * math.log(math.pi / 2)
    result[~near & ~far] = -0.5 * at**2 - 0.5 * math.log(2 * math.pi) + np.log(-np.expm1(ratio))
    at = z[far]
    result[far] = -0.5 * at**2 - 0.5 * math.log(2 * math.pi) - 2 * np.log(-at) + np.log1p(-3 / at**2)
    return result
