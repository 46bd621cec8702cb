"""Averages the probabilities of several models, and counts their votes.

Source: C. Genest and J. V. Zidek, Combining Probability Distributions: A Critique and an Annotated Bibliography,
Statistical Science 1986, for the linear pool.
"""

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

MIN_LOG_PROBABILITY = float(np.log(1e-12))
"""Least log-probability that counts: one record that a model rules out must not decide a fit."""

_TIE_BREAK = 1e-9  # weight of the mean probability beside the votes: above rounding, below any vote that counts


def linear_pool(log_probabilities: npt.ArrayLike, weights: npt.ArrayLike) -> Floats:
    """Averages probabilities: ln sum_m w_m p_m(k), float64 [N, K].

    Args:
        log_probabilities: float [M, N, K], normalised over K.
        weights: float [M], or [N, M] for weights of each record; add up to 1 over M.
    """
    from scipy.special import logsumexp

    values = np.asarray(weights, np.float64)
    by_model = values[:, None, None] if values.ndim == 1 else values.T[:, :, None]
    pooled: Floats = logsumexp(np.asarray(log_probabilities, np.float64), axis=0, b=by_model)
    return pooled


def majority_vote(log_probabilities: npt.ArrayLike, weights: npt.ArrayLike) -> Floats:
    """Returns the log of each label's share of the votes, float64 [N, K]; of labels with equal shares the one with the
    higher summed probability is the most probable.

    The shares say how many models agree, and are not calibrated probabilities. Arguments as `linear_pool`, with weights
    [M].
    """
    logs = np.asarray(log_probabilities, np.float64)
    votes = np.zeros(logs.shape[1:])
    for weight, best in zip(np.asarray(weights, np.float64), logs.argmax(axis=2), strict=True):
        votes[np.arange(len(best)), best] += weight
    shares = (votes + _TIE_BREAK * np.exp(linear_pool(logs, weights))) / (1 + _TIE_BREAK)
    result: Floats = np.log(shares)
    return result
