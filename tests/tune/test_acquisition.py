"""Acquisitions are what their definitions say, by closed forms, by Monte Carlo and by 60 digits; so is the process."""

import math
from typing import Any

import numpy as np
import pytest

from posttrain.tune.acquisition import (
    confidence_weight,
    log_expected_improvement,
    log_probability_of_improvement,
    upper_confidence_bound,
)
from posttrain.tune.gaussian_process import GaussianProcess, MaternKernel, fit_matern

MEANS, DEVIATIONS = np.array([0.0, 1.0, -2.0, 3.0]), np.array([1.0, 0.5, 2.0, 0.8])


def test_closed_forms() -> None:
    from scipy.stats import norm

    z = (0.5 - MEANS) / DEVIATIONS
    closed = DEVIATIONS * (norm.pdf(z) + z * norm.cdf(z))
    np.testing.assert_allclose(np.exp(log_expected_improvement(MEANS, DEVIATIONS, 0.5)), closed, rtol=1e-12)
    np.testing.assert_allclose(np.exp(log_probability_of_improvement(MEANS, DEVIATIONS, 0.5)), norm.cdf(z), rtol=1e-12)
    np.testing.assert_allclose(upper_confidence_bound(MEANS, DEVIATIONS, 4.0), 2 * DEVIATIONS - MEANS, rtol=1e-15)


def test_monte_carlo() -> None:
    draws = MEANS + DEVIATIONS * np.random.default_rng(0).normal(size=(400_000, 4))
    gains = np.maximum(0.5 - draws, 0)
    error = 4 * gains.std(0) / math.sqrt(len(draws))
    assert np.all(np.abs(gains.mean(0) - np.exp(log_expected_improvement(MEANS, DEVIATIONS, 0.5))) < error)
    share = np.exp(log_probability_of_improvement(MEANS, DEVIATIONS, 0.5))
    assert np.all(np.abs((draws < 0.5).mean(0) - share) < 4 * np.sqrt(share * (1 - share) / len(draws)))


# log(φ(z) + z Φ(z)), by mpmath with 60 digits.
DIGITS = {
    -1.001: -2.4870256579553893,
    -5.0: -16.74430116266099,
    -37.0: -692.6429601632705,
    -100.0: -5010.12957880025,
    -999.0: -499015.2324510965,
    -1001.0: -501015.23645108583,
    -10000.0: -50000019.33961931,
}


@pytest.mark.parametrize("z", DIGITS)
def test_the_logarithm_where_expected_improvement_underflows(z: float) -> None:
    assert log_expected_improvement(np.array([-z]), np.ones(1), 0.0)[0] == pytest.approx(DIGITS[z], rel=1e-14)


def test_the_logarithm_is_finite_and_monotone() -> None:
    means = np.geomspace(1e-6, 1e8, 500)
    logs = log_expected_improvement(means, np.ones(500), 0.0)
    assert np.isfinite(logs).all()
    assert (np.diff(logs) < 0).all()


def test_the_weight_of_confidence() -> None:
    assert confidence_weight(10, 2) == pytest.approx(2 / 5 * math.log(2 * 100 * math.pi**2 / 0.6))


def test_the_process_is_that_of_scikit_learn() -> None:
    from sklearn.gaussian_process import GaussianProcessRegressor
    from sklearn.gaussian_process.kernels import Matern, WhiteKernel

    generator = np.random.default_rng(0)
    points, values, new = generator.random((12, 3)), generator.normal(size=12), generator.random((5, 3))
    lengths = np.array([0.3, 0.8, 2.0])
    process = GaussianProcess(points, MaternKernel(lengths), 0.05)
    reference = GaussianProcessRegressor(Matern(lengths, nu=2.5) + WhiteKernel(0.05), alpha=1e-300, optimizer=None).fit(
        points, values
    )
    mean, deviation = reference.predict(new, return_std=True)
    np.testing.assert_allclose(process.mean(values, new), mean, rtol=1e-9)
    np.testing.assert_allclose(process.deviation(new) ** 2, deviation**2 - 0.05, rtol=1e-7)


def test_the_fit_finds_which_coordinate_counts() -> None:
    generator = np.random.default_rng(1)
    points = generator.random((40, 2))
    values = np.sin(9 * points[:, 0]) + 0.01 * generator.normal(size=40)
    process = fit_matern(points, values - values.mean(), generator)
    assert process.kernel.lengths[0] < 0.2 * process.kernel.lengths[1]
    assert process.noise < 1e-2


def test_the_gradient_of_the_fit_is_that_of_its_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    from scipy import optimize

    minimize = optimize.minimize
    calls = []

    def note(loss: Any, start: np.ndarray, **options: Any) -> Any:
        calls.append((loss, start))
        return minimize(loss, start, **options)

    monkeypatch.setattr(optimize, "minimize", note)
    generator = np.random.default_rng(2)
    points, values = generator.random((12, 3)), generator.normal(size=12)
    fit_matern(points, values - values.mean(), generator)
    for loss, start in calls:
        numeric = optimize.approx_fprime(start, lambda logs, loss=loss: loss(logs)[0], 1e-6)
        np.testing.assert_allclose(loss(start)[1], numeric, rtol=1e-3, atol=1e-4)
