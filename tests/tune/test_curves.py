"""Forecasts of learning curves equal a direct computation, are calibrated, and find what curves tend to."""

import math

import numpy as np
import pytest
from scipy.stats import kstest, multivariate_normal, norm

from posttrain.tune.curves import Forecast, basis, extrapolate
from posttrain.tune.schedulers.base import Decision
from posttrain.tune.schedulers.extrapolation import Extrapolation

NOISES = (0.003, 0.01, 0.03, 0.1, 0.3)

LAST = 20


def test_the_posterior_of_the_whole_joint_distribution() -> None:
    # Of each shape and noise the joint normal distribution of all observations and the last value, conditioned.
    generator = np.random.default_rng(0)
    steps = np.array([1, 2, 4, 5])
    values = 0.7 + 1.3 * steps**-0.5 + 0.05 * generator.standard_normal(4)
    centre, scale = 0.9, 0.4
    forecast = extrapolate(steps.tolist(), values.tolist(), LAST, centre, scale)
    whole = np.array([*steps, LAST], dtype=float)
    evidence, means, deviations = [], [], []
    for shape in basis(whole, LAST):
        for noise in NOISES:
            covariance = scale**2 * (1.5**2 + 3.0**2 * np.outer(shape, shape) + noise**2 * np.eye(5))
            known, cross = covariance[:4, :4], covariance[4, :4]
            evidence.append(multivariate_normal(np.full(4, centre), known).pdf(values))
            means.append(centre + cross @ np.linalg.solve(known, values - centre))
            deviations.append(math.sqrt(covariance[4, 4] - cross @ np.linalg.solve(known, cross)))
    np.testing.assert_allclose(forecast.weights, np.array(evidence) / sum(evidence), rtol=1e-6)
    np.testing.assert_allclose(forecast.means, means, rtol=1e-7)
    np.testing.assert_allclose(forecast.deviations, deviations, rtol=1e-6)
    below = sum(
        weight * norm(mean, sd).cdf(1.0) for weight, mean, sd in zip(forecast.weights, means, deviations, strict=True)
    )
    assert forecast.probability_below(1.0) == pytest.approx(below, rel=1e-6)


def test_forecasts_of_curves_of_the_prior_are_calibrated() -> None:
    # The probability of what came is then uniform, however much of the curve is known.
    generator = np.random.default_rng(1)
    steps = np.arange(1, LAST + 1, dtype=float)
    shapes = basis(steps, LAST)
    probabilities = []
    for _ in range(400):
        shape, noise = shapes[generator.integers(len(shapes))], generator.choice(NOISES)
        curve = 1.5 * generator.standard_normal() + 3.0 * generator.standard_normal() * shape
        curve += noise * generator.standard_normal(LAST)
        seen = int(generator.integers(2, 12))
        forecast = extrapolate(range(1, seen + 1), curve[:seen].tolist(), LAST)
        probabilities.append(forecast.probability_below(float(curve[-1])))
    assert kstest(probabilities, "uniform").pvalue > 0.01


@pytest.mark.parametrize("curve", [lambda t: 0.5 + 2 * t**-0.5, lambda t: 1.5 - np.exp(-3 * (t - 1) / (LAST - 1))])
def test_a_clean_curve_is_followed_to_its_end(curve: "object") -> None:
    values = [float(curve(step)) for step in range(1, 9)]  # type: ignore[operator]
    forecast = extrapolate(range(1, 9), values, LAST)
    assert forecast.mean == pytest.approx(float(curve(LAST)), abs=0.02)  # type: ignore[operator]
    assert 0.05 < forecast.probability_below(float(curve(LAST))) < 0.95  # type: ignore[operator]


def test_more_of_a_curve_makes_its_end_more_certain() -> None:
    values = [1 + 1 / step for step in range(1, LAST)]
    widths = []
    for seen in (2, 5, 10, 19):
        forecast = extrapolate(range(1, seen + 1), values[:seen], LAST)
        widths.append(forecast.deviation)
    assert widths == sorted(widths, reverse=True)


def test_the_unit_and_the_origin_of_values_do_not_matter() -> None:
    values = [0.9, 0.7, 0.62, 0.6]
    plain = extrapolate(range(1, 5), values, LAST, 0.5, 0.2)
    other = extrapolate(range(1, 5), [1000 * value - 7 for value in values], LAST, 493, 200)
    np.testing.assert_allclose(plain.weights, other.weights, rtol=1e-6)
    assert other.probability_below(1000 * 0.55 - 7) == pytest.approx(plain.probability_below(0.55))


def test_a_forecast_is_a_mixture() -> None:
    forecast = Forecast(np.array([0.3, 0.7]), np.array([-1.0, 2.0]), np.array([0.5, 0.1]))
    for value in (-2.0, -1.0, 1.9, 2.1):
        below = 0.3 * norm.cdf(value, -1.0, 0.5) + 0.7 * norm.cdf(value, 2.0, 0.1)
        assert forecast.probability_below(value) == pytest.approx(below)
    assert forecast.mean == pytest.approx(1.1)


def test_a_wider_forecast_has_the_same_mean() -> None:
    forecast = extrapolate([1, 2, 3], [3.0, 2.0, 1.7], 9, centre=1.5)
    wider = forecast.widened(2.5)
    assert wider.mean == pytest.approx(forecast.mean)
    assert wider.deviation == pytest.approx(2.5 * forecast.deviation)
    # Against draws from the mixture.
    generator = np.random.default_rng(0)
    part = generator.choice(len(forecast.weights), 200_000, p=forecast.weights)
    draws = generator.normal(forecast.means[part], forecast.deviations[part])
    assert forecast.deviation == pytest.approx(draws.std(), rel=0.02)


def test_curves_that_fall_late_make_the_rule_careful() -> None:
    """Losses that stay until the middle and then fall, as those of a cosine schedule: no curve of the family does."""

    def falls_late(end: float) -> list[float]:
        return [5.0, 4.99, 4.98, 4.97, 4.9, 4.0, end + 1, end + 0.1, end]

    rule = Extrapolation(9)
    for number in range(6):
        rule.started(number, 9, {})
        for step, value in enumerate(falls_late(1.0 + number / 10), 1):
            assert rule.report(number, step, value) is (Decision.CONTINUE if step < 9 else Decision.STOP)
        rule.ended(number, 1.0 + number / 10)
    rule.started(6, 9, {})
    for step, value in enumerate(falls_late(0.5)[:8], 1):
        assert rule.report(6, step, value) is Decision.CONTINUE, step
