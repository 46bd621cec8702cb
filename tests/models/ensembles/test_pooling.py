"""The average and the vote equal their formulas in float64."""

import itertools

import numpy as np
import pytest
from label_models import random_logs

from posttrain.models.ensembles.pooling import linear_pool, majority_vote

WEIGHTS = [0.5, 0.2, 0.3]

POOLS = {"average": linear_pool, "vote": majority_vote}


def test_the_linear_pool_is_the_weighted_mean_of_probabilities() -> None:
    logs = random_logs(3, 20, 4)
    expected = sum(weight * np.exp(own) for weight, own in zip(WEIGHTS, logs, strict=True))
    np.testing.assert_allclose(np.exp(linear_pool(logs, WEIGHTS)), expected, rtol=1e-13)


def test_each_record_may_have_weights_of_its_own() -> None:
    logs = random_logs(2, 3, 4)
    weights = np.array([[1.0, 0.0], [0.0, 1.0], [0.5, 0.5]])
    result = linear_pool(logs, weights)
    np.testing.assert_allclose(result[:2], [logs[0, 0], logs[1, 1]])
    np.testing.assert_allclose(np.exp(result[2]), np.exp(logs[:, 2]).mean(axis=0))


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


@pytest.mark.parametrize("method", POOLS)
@pytest.mark.parametrize("copies", [1, 3])
def test_one_model_or_equal_ones_are_that_model(method: str, copies: int) -> None:
    logs = np.repeat(random_logs(1, 30, 4), copies, axis=0)
    result = POOLS[method](logs, [1.0] if copies == 1 else WEIGHTS)
    if method == "vote":
        np.testing.assert_array_equal(result.argmax(axis=1), logs[0].argmax(axis=1))
    else:
        np.testing.assert_allclose(result, logs[0], atol=1e-12)


@pytest.mark.parametrize("method", POOLS)
def test_the_order_of_the_models_does_not_matter(method: str) -> None:
    logs, weights = random_logs(3, 50, 3), np.array([0.1, 0.2, 0.7])
    first = POOLS[method](logs, weights)
    for order in itertools.permutations(range(3)):
        other = POOLS[method](logs[list(order)], weights[list(order)])
        np.testing.assert_allclose(other, first, rtol=1e-9, atol=1e-9)
        np.testing.assert_array_equal(other.argmax(axis=1), first.argmax(axis=1))
