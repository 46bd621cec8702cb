"""Exact limits and tests of a binomial share, and the thresholds of confidence that are tested in sequence.

Sources: C. J. Clopper and E. S. Pearson, The Use of Confidence or Fiducial Limits Illustrated in the Case of the
Binomial, Biometrika 26 (1934); A. N. Angelopoulos et al., Learn then Test: Calibrating Predictive Algorithms to Achieve
Risk Control, 2021 (arXiv:2110.01052), section 2.2 for the test of a fixed sequence.
"""

import math

LEVEL = 0.95
"""Probability with which a bound on an error holds."""

THRESHOLDS = (
    1.0,
    0.9995,
    0.999,
    0.998,
    0.997,
    0.995,
    0.99,
    0.985,
    *(round(0.98 - step / 100, 2) for step in range(99)),
)
"""Confidences that are tested, the strictest first. Fixed before the data is seen, as the test of a sequence needs."""


def clopper_pearson(errors: int, count: int, level: float = LEVEL) -> tuple[float, float]:
    """Computes the exact two-sided interval of a binomial share.

    Args:
        errors: of ``count`` draws.
        level: its coverage is at least this.

    Returns:
        Lower and upper limit; 0 and 1 without draws.
    """
    tail = (1 - level) / 2
    return lower_limit(errors, count, tail), upper_limit(errors, count, tail)


def upper_limit(errors: int, count: int, tail: float) -> float:
    """Returns the share that so few errors exclude at the probability ``tail``; 1 where all are errors."""
    from scipy.special import betaincinv

    return 1.0 if errors >= count else float(betaincinv(errors + 1, count - errors, 1 - tail))


def lower_limit(errors: int, count: int, tail: float) -> float:
    """Returns the share that so many errors exclude at the probability ``tail``; 0 without errors."""
    from scipy.special import betaincinv

    return 0.0 if errors == 0 or not count else float(betaincinv(errors, count - errors + 1, tail))


def shows_error_below(errors: int, count: int, bound: float) -> bool:
    """Returns whether so few errors are too rare for a share above the bound: the one-sided exact test."""
    from scipy.special import bdtr

    return errors < count and bool(bdtr(errors, count, bound) <= 1 - LEVEL)


def needed_answers(bound: float, errors: int = 0) -> int:
    """Returns the fewest held-out answers with so many errors that show an error of at most ``bound``, in (0, 1)."""
    # Without an error (1 - bound) ^ n <= 1 - level; each further one needs about 1 / bound more.
    high = math.ceil(math.log(1 - LEVEL) / math.log1p(-bound)) + errors + 1
    while not shows_error_below(errors, high, bound):
        high *= 2
    low = errors
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if shows_error_below(errors, middle, bound) else (middle, high)
    return high
