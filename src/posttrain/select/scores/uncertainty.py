"""Uncertainty measures over label probabilities.

Sources: C. E. Shannon, A Mathematical Theory of Communication (1948), for entropy; B. Settles, Active
Learning Literature Survey (2009), section 3.1, for entropy, least confidence and margin as query strategies."""

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


def entropy(probabilities: np.ndarray) -> np.ndarray:
    """Computes the entropy H = -sum_k p_k ln p_k, in nats; 0 ln 0 counts as 0.

    Args:
        probabilities: float [N, K], every row sums to 1.

    Returns:
        float64 [N] between 0 (sure) and ln K (all labels alike). ``[0.4, 0.35, 0.25]`` gives 1.0805.
    """
    p = _check_probabilities(probabilities)
    logarithms = np.log(p, out=np.zeros_like(p), where=p > 0)
    nats: np.ndarray = np.abs((p * logarithms).sum(axis=1))  # a negation would give a sure row -0.0
    return nats


def least_confidence(probabilities: np.ndarray) -> np.ndarray:
    """Computes one minus the greatest probability.

    Args:
        probabilities: float [N, K], every row sums to 1.

    Returns:
        float64 [N] between 0 (sure) and 1 - 1/K. ``[0.4, 0.35, 0.25]`` gives 0.6.
    """
    missing: np.ndarray = 1.0 - _check_probabilities(probabilities).max(axis=1)
    return missing


def margin(probabilities: np.ndarray) -> np.ndarray:
    """Computes the greatest probability minus the second greatest: small where two labels compete.

    Args:
        probabilities: float [N, K], every row sums to 1.

    Returns:
        float64 [N] between 0 (a tie) and 1 (sure, and always 1 for K = 1). ``[0.4, 0.35, 0.25]`` gives 0.05.
    """
    p = _check_probabilities(probabilities)
    if p.shape[1] == 1:
        return p[:, 0].copy()
    # A partition, not a sort: only the two greatest of possibly thousands of labels are needed.
    top = np.partition(p, p.shape[1] - 2, axis=1)
    return top[:, -1] - top[:, -2]


def _check_probabilities(probabilities: np.ndarray) -> np.ndarray:
    p = np.asarray(probabilities, dtype=np.float64)
    if p.ndim != 2 or p.shape[1] == 0:
        raise ValueError(f"probabilities must be [N, K] with K >= 1, got shape {p.shape}")
    return p
