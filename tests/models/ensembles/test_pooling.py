"""Pools and votes equal their formulas in float64, and fitted weights are the best there are."""

import itertools

import numpy as np
import pytest
from label_models import random_logs

from posttrain.models.ensembles.pooling import POOLS, fit_pool_weights, linear_pool, log_pool, majority_vote

WEIGHTS = [0.5, 0.2, 0.3]


def test_the_linear_pool_is_the_weighted_mean_of_probabilities() -> None:
    logs = random_logs(3, 20, 4)
    expected = sum(weight * np.exp(own) for weight, own in zip(WEIGHTS, logs, strict=True))
    np.testing.assert_allclose(np.exp(linear_pool(logs, WEIGHTS)), expected, rtol=1e-13)


def test_the_logarithmic_pool_is_the_normalised_weighted_geometric_mean() -> None:
    logs = random_logs(3, 20, 4)
    product = np.prod([np.exp(own) ** weight for weight, own in zip(WEIGHTS, logs, strict=True)], axis=0)
    np.testing.assert_allclose(
        np.exp(log_pool(logs, WEIGHTS)), product / product.sum(axis=1, keepdims=True), rtol=1e-12
    )


def test_logit_averaging_is_the_logarithmic_pool() -> None:
    """Whatever constant a model adds to its logits."""
    logits = np.random.default_rng(1).standard_normal((2, 9, 5)) + np.array([3.0, -7.0])[:, None, None]
    logs = logits - np.log(np.exp(logits).sum(axis=2, keepdims=True))
    mean = np.exp(logits.mean(axis=0))
    np.testing.assert_allclose(np.exp(log_pool(logs, [0.5, 0.5])), mean / mean.sum(axis=1, keepdims=True), rtol=1e-12)


def test_one_certain_zero_forbids_nothing() -> None:
    logs = np.array([[np.log([0.9, 0.1])], [[0.0, -np.inf]]])
    for pool in POOLS.values():
        assert np.isfinite(pool(logs, [0.5, 0.5])).all()


def test_a_vote_counts_models_and_breaks_ties_by_probability() -> None:
    probabilities = np.array([[[0.6, 0.3, 0.1]], [[0.1, 0.8, 0.1]], [[0.2, 0.1, 0.7]]])
    shares = np.exp(majority_vote(np.log(probabilities), [1 / 3] * 3))[0]
    np.testing.assert_allclose(shares, 1 / 3, atol=1e-8)
    assert shares.argmax() == 1  # summed: 0.9, 1.2, 0.9
    assert np.exp(majority_vote(np.log(probabilities), [0.4, 0.3, 0.3]))[0].argmax() == 0


def test_a_vote_without_a_tie_ignores_how_sure_models_are() -> None:
    probabilities = np.array([[[0.51, 0.49]], [[0.51, 0.49]], [[0.001, 0.999]]])
    result = np.exp(majority_vote(np.log(probabilities), [1 / 3] * 3))[0]
    np.testing.assert_allclose(result, [2 / 3, 1 / 3], atol=1e-8)


@pytest.mark.parametrize("method", sorted(POOLS))
def test_one_model_is_that_model(method: str) -> None:
    logs = random_logs(1, 30, 4)
    result = POOLS[method](logs, [1.0])
    if method == "vote":
        np.testing.assert_array_equal(result.argmax(axis=1), logs[0].argmax(axis=1))
    else:
        np.testing.assert_allclose(result, logs[0], atol=1e-12)


@pytest.mark.parametrize("method", sorted(POOLS))
def test_equal_models_are_that_model(method: str) -> None:
    logs = np.repeat(random_logs(1, 30, 4), 3, axis=0)
    result = POOLS[method](logs, WEIGHTS)
    if method == "vote":
        np.testing.assert_array_equal(result.argmax(axis=1), logs[0].argmax(axis=1))
    else:
        np.testing.assert_allclose(result, logs[0], atol=1e-12)


@pytest.mark.parametrize("method", sorted(POOLS))
def test_the_order_of_the_models_does_not_matter(method: str) -> None:
    logs, weights = random_logs(3, 50, 3), np.array([0.1, 0.2, 0.7])
    first = POOLS[method](logs, weights)
    for order in itertools.permutations(range(3)):
        other = POOLS[method](logs[list(order)], weights[list(order)])
        np.testing.assert_allclose(other, first, rtol=1e-9, atol=1e-9)
        np.testing.assert_array_equal(other.argmax(axis=1), first.argmax(axis=1))


@pytest.mark.parametrize("method", ["probability", "logit"])
def test_fitted_weights_are_the_best_of_a_grid(method: str) -> None:
    generator = np.random.default_rng(3)
    logs = random_logs(3, 300, 4, seed=3)
    # The first two models know something, the third nothing.
    truth = np.array([generator.choice(4, p=np.exp(row)) for row in logs[0]])
    truth[::3] = logs[1, ::3].argmax(axis=1)
    weights = fit_pool_weights(method, logs, truth)  # type: ignore[arg-type]
    assert sum(weights) == pytest.approx(1, abs=1e-12)

    def loss(candidate: list[float]) -> float:
        return -float(POOLS[method](logs, candidate)[np.arange(300), truth].mean())

    steps = np.linspace(0, 1, 41)
    grid = min(loss([a, b, 1 - a - b]) for a in steps for b in steps if a + b <= 1 + 1e-12)
    assert loss(weights) <= grid + 1e-9
    assert weights[2] < 0.1 < min(weights[:2])


def test_fitted_weights_of_the_linear_pool_are_ems_fixed_point() -> None:
    """The mean responsibility of a model is its weight, where it has one."""
    logs = random_logs(3, 200, 3, seed=5)
    truth = np.random.default_rng(5).integers(0, 3, 200)
    weights = np.array(fit_pool_weights("probability", logs, truth))
    own = np.exp(logs[:, np.arange(200), truth])
    responsibilities = weights[:, None] * own / (weights @ own)
    np.testing.assert_allclose(responsibilities.mean(axis=1), weights, atol=2e-5)


def test_a_single_model_has_all_the_weight() -> None:
    assert fit_pool_weights("logit", random_logs(1, 3, 2), [0, 1, 0]) == [1.0]
