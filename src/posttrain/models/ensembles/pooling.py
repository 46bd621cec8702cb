"""Pools the probabilities of several models, takes their vote, and fits weights by the log-loss.

Sources: C. Genest and J. V. Zidek, Combining Probability Distributions: A Critique and an Annotated Bibliography,
Statistical Science 1986, for the linear and the logarithmic pool; G. E. Hinton, Training Products of Experts by
Minimizing Contrastive Divergence, 2002, has the latter as a product of experts. "Logit averaging" is the logarithmic
pool: a softmax does not see what is added to all logits of a model.
"""

from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Labels = npt.NDArray[np.int64]

MIN_LOG_PROBABILITY = float(np.log(1e-12))
"""Least log-probability in a logarithmic pool: one model's 0 would forbid a label whatever the others say."""

_TIE_BREAK = 1e-9  # weight of the mean probability beside the votes: above rounding, below any vote that counts


def linear_pool(log_probabilities: npt.ArrayLike, weights: npt.ArrayLike) -> Floats:
    """Averages probabilities: ln sum_m w_m p_m(k), float64 [N, K].

    Args:
        log_probabilities: float [M, N, K], normalised over K.
        weights: float [M], or [N, M] for weights of each record; add up to 1 over M.
    """
    from scipy.special import logsumexp

    logs = np.asarray(log_probabilities, np.float64)
    pooled: Floats = logsumexp(logs, axis=0, b=_by_model(weights))
    return pooled


def log_pool(log_probabilities: npt.ArrayLike, weights: npt.ArrayLike) -> Floats:
    """Averages log-probabilities, and normalises over the labels again: float64 [N, K]. Arguments as `linear_pool`."""
    from scipy.special import log_softmax

    logs = np.maximum(np.asarray(log_probabilities, np.float64), MIN_LOG_PROBABILITY)
    pooled: Floats = log_softmax((_by_model(weights) * logs).sum(axis=0), axis=1)
    return pooled


def majority_vote(log_probabilities: npt.ArrayLike, weights: npt.ArrayLike) -> Floats:
    """Returns the log of each label's share of the votes, float64 [N, K]; of labels with equal shares the one with the
    higher summed probability is the most probable.

    The shares say how many models agree, and are no calibrated probabilities. Arguments as `linear_pool`.
    """
    logs = np.asarray(log_probabilities, np.float64)
    votes = np.zeros(logs.shape[1:])
    for weight, best in zip(np.asarray(weights, np.float64), logs.argmax(axis=2), strict=True):
        votes[np.arange(len(best)), best] += weight
    shares = (votes + _TIE_BREAK * np.exp(linear_pool(logs, weights))) / (1 + _TIE_BREAK)
    result: Floats = np.log(shares)
    return result


POOLS: dict[str, Callable[[npt.ArrayLike, npt.ArrayLike], Floats]] = {
    "probability": linear_pool,
    "logit": log_pool,
    "vote": majority_vote,
}


def fit_pool_weights(
    method: Literal["probability", "logit"], log_probabilities: npt.ArrayLike, truth: npt.ArrayLike
) -> list[float]:
    """Returns the weights, 0 or more with sum 1, of the least log-loss; the loss of both pools is convex in them.

    Args:
        method: the pool.
        log_probabilities: float [M, N, K] of records that no model learned from, N >= 1.
        truth: int [N], the right labels.
    """
    from scipy.optimize import minimize
    from scipy.special import logsumexp, softmax

    logs, right = np.asarray(log_probabilities, np.float64), np.asarray(truth, np.int64)
    models, count = logs.shape[:2]
    if models == 1:
        return [1.0]
    floored = np.maximum(logs, MIN_LOG_PROBABILITY)
    own = floored[:, np.arange(count), right]  # [M, N]

    def loss(weights: Floats) -> tuple[float, Floats]:
        if method == "probability":
            mixed = logsumexp(own, axis=0, b=np.maximum(weights, 1e-300)[:, None])
            return float(-mixed.mean()), -np.exp(own - mixed).mean(axis=1)
        mixture = np.tensordot(weights, floored, 1)
        expected = (floored * softmax(mixture, axis=1)).sum(axis=2)
        return float((logsumexp(mixture, axis=1) - weights @ own).mean()), (expected - own).mean(axis=1)

    result = minimize(
        loss,
        np.full(models, 1 / models),
        jac=True,
        method="SLSQP",
        bounds=[(0.0, 1.0)] * models,
        constraints={"type": "eq", "fun": lambda w: w.sum() - 1, "jac": lambda w: np.ones_like(w)},
        options={"ftol": 1e-12, "maxiter": 500},
    )
    weights = np.clip(result.x, 0.0, None)
    return [float(weight) for weight in weights / weights.sum()]


def _by_model(weights: npt.ArrayLike) -> Floats:
    """Returns weights [M] or [N, M] in a shape that multiplies [M, N, K]."""
    values = np.asarray(weights, np.float64)
    return values[:, None, None] if values.ndim == 1 else values.T[:, :, None]


def log_loss(log_probabilities: Floats, truth: Sequence[int] | Labels) -> float:
    """Returns the mean negative log-probability of the right labels, in nats; float [N, K] and int [N]."""
    return float(-log_probabilities[np.arange(len(truth)), np.asarray(truth, np.int64)].mean())
