"""Limits of the mean of bounded losses: exact for 0 and 1, valid for others, and one formula for test and limit."""

import math

import numpy as np
import pytest

from posttrain.models.binomial import clopper_pearson, shows_error_below
from posttrain.models.bounded_mean import mean_interval, mean_upper_limit, shows_mean_below


def p_value(losses: np.ndarray, bound: float) -> float:
    """Hoeffding-Bentkus, written out."""
    from scipy.stats import binom

    n, mean = len(losses), losses.mean()
    if mean >= bound:
        return 1.0
    h = (1 - mean) * math.log((1 - mean) / (1 - bound)) + (mean * math.log(mean / bound) if mean else 0.0)
    return min(math.exp(-n * h), math.e * binom.cdf(math.ceil(losses.sum()), n, bound))


@pytest.mark.parametrize("seed", range(20))
def test_the_test_is_that_of_the_formula(seed: int) -> None:
    losses = np.random.default_rng(seed).beta(0.3, 4, 60)
    for bound in (0.02, 0.05, 0.1, 0.15, 0.2, 0.4):
        assert shows_mean_below(losses, bound) == (p_value(losses, bound) <= 0.05)


def test_the_limit_is_where_the_test_begins_to_hold() -> None:
    losses = np.random.default_rng(3).uniform(0, 0.3, 80)
    limit = mean_upper_limit(losses, 0.05)
    assert shows_mean_below(losses, limit + 1e-9)
    assert not shows_mean_below(losses, limit - 1e-9)
    assert losses.mean() < limit < 1


@pytest.mark.parametrize("errors", [0, 1, 7, 30])
def test_losses_of_0_and_1_have_the_exact_binomial_limits(errors: int) -> None:
    losses = np.array([1.0] * errors + [0.0] * (30 - errors))
    assert mean_interval(losses) == pytest.approx(clopper_pearson(errors, 30))
    assert shows_mean_below(losses, 0.2) == shows_error_below(errors, 30, 0.2)


@pytest.mark.parametrize("draw", ["beta", "uniform", "nearly binary"])
def test_the_interval_covers_the_mean(draw: str) -> None:
    draws = {
        "beta": (lambda rng: rng.beta(0.2, 1.8, 50), 0.1),
        "uniform": (lambda rng: rng.uniform(0, 1, 50), 0.5),
        "nearly binary": (lambda rng: np.where(rng.random(50) < 0.1, rng.uniform(0.9, 1.0, 50), 0.0), 0.095),
    }
    sample, mean = draws[draw]
    intervals = [mean_interval(sample(np.random.default_rng(seed))) for seed in range(200)]
    missed = sum(not low <= mean <= high for low, high in intervals)
    assert missed <= 18  # 200 draws of 5% are at most this with a probability of 0.99


def test_the_interval_of_the_complement_is_the_complement() -> None:
    losses = np.random.default_rng(0).beta(1, 3, 40)
    low, high = mean_interval(losses)
    assert mean_interval(1 - losses) == pytest.approx((1 - high, 1 - low))
