"""Limits and tests of the mean of losses between 0 and 1; exact where every loss is 0 or 1, else by Hoeffding-Bentkus.

Source: A. N. Angelopoulos et al., Learn then Test: Calibrating Predictive Algorithms to Achieve Risk Control, 2021
(arXiv:2110.01052), the Hoeffding-Bentkus p-value: with h(a, b) = a ln(a / b) + (1 - a) ln((1 - a) / (1 - b)),

    min(exp(-n h(min(mean, bound), bound)), e P(Binomial(n, bound) <= ceil(n mean)))

is a p-value of the hypothesis that the losses' expectation is above the bound. The first term is Hoeffding's, the
second Bentkus's inequality.
"""

import math

import numpy as np
import numpy.typing as npt

from posttrain.models.binomial import LEVEL, lower_limit, shows_error_below, upper_limit

Floats = npt.NDArray[np.float64]

_HALVINGS = 50  # of the interval in which a limit is searched: to the last digit of a float64


def is_binary(losses: Floats) -> bool:
    """Returns whether every loss is 0 or 1, so that their sum is binomial."""
    # The test stays valid where such a sample comes from losses that may lie between: for them P(loss = 1) is at most
    # the mean, and P(loss = 0) at most 1 - mean.
    return bool(np.isin(losses, (0.0, 1.0)).all())


def shows_mean_below(losses: Floats, bound: float) -> bool:
    """Returns whether losses, float64 [N] in [0, 1], are too low for a mean above the bound, at `LEVEL`."""
    if is_binary(losses):
        return shows_error_below(int(losses.sum()), len(losses), bound)
    return _p_value(math.fsum(losses), len(losses), bound) <= 1 - LEVEL


def mean_upper_limit(losses: Floats, tail: float) -> float:
    """Returns the mean that losses, float64 [N] in [0, 1], exclude at the probability ``tail``."""
    count, total = len(losses), math.fsum(losses)
    if is_binary(losses):
        return upper_limit(int(total), count, tail)
    low, high = total / count, 1.0
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if _p_value(total, count, middle) <= tail else (middle, high)
    return high


def mean_interval(losses: Floats, level: float = LEVEL) -> tuple[float, float]:
    """Returns a two-sided interval of the mean of losses, float64 [N >= 1] in [0, 1]; it covers at least ``level``."""
    tail = (1 - level) / 2
    low = (
        lower_limit(int(losses.sum()), len(losses), tail)
        if is_binary(losses)
        else 1 - mean_upper_limit(1 - losses, tail)
    )
    return low, mean_upper_limit(losses, tail)


def _p_value(total: float, count: int, bound: float) -> float:
    """Returns the Hoeffding-Bentkus p-value of ``count`` losses with the sum ``total``; ``bound`` is in (0, 1]."""
    from scipy.special import bdtr, rel_entr

    mean = total / count
    if bound >= 1 or mean >= bound:
        return 1.0
    hoeffding = math.exp(-count * float(rel_entr(mean, bound) + rel_entr(1 - mean, 1 - bound)))
    bentkus = math.e * float(bdtr(math.ceil(total), count, bound))
    return min(1.0, hoeffding, bentkus)
