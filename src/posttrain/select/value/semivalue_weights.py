"""How much a semivalue counts the sets of each size that a player joins."""

import numpy as np

from posttrain.select.value.checks import check_positive
from posttrain.select.value.utilities.utility import Floats
from posttrain.store.errors import UserError


def shapley_weights(players: int) -> Floats:
    """Every size alike, 1/n: float64 [n] by the size of the set joined, 0..n-1, summing to 1 as all here."""
    check_positive(players=players)
    return np.full(players, 1 / players)


def banzhaf_weights(players: int) -> Floats:
    """Every set alike: a size counts C(n-1, s) / 2^(n-1)."""
    from scipy.special import gammaln

    check_positive(players=players)
    sizes = np.arange(players)
    logarithms = gammaln(players) - gammaln(sizes + 1) - gammaln(players - sizes) - (players - 1) * np.log(2)
    weights: Floats = np.exp(logarithms)
    return weights


def beta_weights(players: int, alpha: float, beta: float) -> Floats:
    """C(n-1, s) B(s + beta, n - 1 - s + alpha) / B(alpha, beta): Beta(alpha, beta)-Shapley.

    Kwon and Zou, "Beta Shapley: a unified and noise-reduced data valuation framework for machine learning" (AISTATS
    2022, arXiv:2110.14049), whose weights are n times these and whose j is s + 1. A large alpha counts small sets
    more; (1, 1) is Shapley's.

    Raises:
        UserError: alpha or beta is not positive.
    """
    from scipy.special import betaln, gammaln

    check_positive(players=players)
    if not (0 < alpha < np.inf and 0 < beta < np.inf):
        raise UserError(f"alpha and beta must be positive, and are {alpha} and {beta}")
    sizes = np.arange(players)
    choices = gammaln(players) - gammaln(sizes + 1) - gammaln(players - sizes)
    logarithms = choices + betaln(sizes + beta, players - 1 - sizes + alpha) - betaln(alpha, beta)
    weights: Floats = np.exp(logarithms)
    return weights
