"""Values of games whose solutions have a closed form."""

from collections.abc import Callable

import numpy as np
import pytest
from scipy.special import beta as beta_function

from posttrain.attribution import (
    Values,
    banzhaf,
    banzhaf_weights,
    beta_shapley,
    beta_weights,
    leave_one_out,
    semivalue,
    shapley,
    shapley_weights,
    tmc_shapley,
)

COSTS = np.array([1.0, 1.5, 4.0, 4.0, 7.0, 11.0])
RIGHT_GLOVES = 4
AbsenceProbability = Callable[[int], float]


def majority(rows: np.ndarray) -> float:
    """A weighted majority: weights 2, 1, 1 and a quota of 3."""
    return float(np.array([2, 1, 1])[rows].sum() >= 3)


def airport(rows: np.ndarray) -> float:
    """The cost of the runway: that of the largest aircraft."""
    return float(COSTS[rows].max(initial=0))


def gloves(rows: np.ndarray) -> float:
    """One left glove, player 0, and several right ones: a pair is worth 1."""
    left_gloves = int((rows == 0).sum())
    return float(min(left_gloves, len(rows) - left_gloves))


def airport_values(absence: AbsenceProbability) -> np.ndarray:
    """A player pays each cost step if no other of the m players that need it is in the set: ``absence(m)``."""
    steps = np.diff(COSTS, prepend=0)
    return np.cumsum([step * absence(len(COSTS) - position - 1) for position, step in enumerate(steps)])


def beta_absence(alpha: float, beta: float) -> AbsenceProbability:
    """Beta-Shapley includes every other player with one probability, sampled from Beta(beta, alpha)."""
    return lambda others: float(beta_function(alpha + others, beta) / beta_function(alpha, beta))


def test_weighted_majority() -> None:
    np.testing.assert_allclose(shapley(majority, 3).values, [2 / 3, 1 / 6, 1 / 6], rtol=1e-12)
    np.testing.assert_allclose(semivalue(majority, banzhaf_weights(3)).values, [3 / 4, 1 / 4, 1 / 4], rtol=1e-12)
    np.testing.assert_allclose(semivalue(majority, beta_weights(3, 2, 1)).values, [1 / 2, 1 / 6, 1 / 6], rtol=1e-12)


def test_the_airport_game() -> None:
    exact = shapley(airport, 6).values
    np.testing.assert_allclose(exact, airport_values(lambda others: 1 / (others + 1)), rtol=1e-12)
    np.testing.assert_allclose(
        semivalue(airport, banzhaf_weights(6)).values, airport_values(lambda others: 0.5**others), rtol=1e-12
    )
    for alpha, beta in [(1, 1), (16, 1), (1, 4), (2.5, 0.5)]:
        result = semivalue(airport, beta_weights(6, alpha, beta)).values
        np.testing.assert_allclose(result, airport_values(beta_absence(alpha, beta)), rtol=1e-12)


def test_the_glove_game() -> None:
    others, players = RIGHT_GLOVES, RIGHT_GLOVES + 1
    right = 1 / (others * (others + 1))
    np.testing.assert_allclose(shapley(gloves, players).values, [others / (others + 1)] + [right] * others, rtol=1e-12)
    result = semivalue(gloves, banzhaf_weights(players)).values
    np.testing.assert_allclose(result, [1 - 0.5**others] + [0.5**others] * others, rtol=1e-12)
    alpha, beta = 3.0, 2.0
    pair = beta_function(beta + 1, alpha + others - 1) / beta_function(alpha, beta)
    result = semivalue(gloves, beta_weights(players, alpha, beta)).values
    np.testing.assert_allclose(result, [1 - beta_absence(alpha, beta)(others)] + [pair] * others, rtol=1e-12)


def test_weights_sum_to_one_even_for_many_players() -> None:
    for players in (1, 2, 7, 5000):
        for weights in (shapley_weights(players), banzhaf_weights(players), beta_weights(players, 16, 1)):
            assert weights.shape == (players,)
            np.testing.assert_allclose(weights.sum(), 1, rtol=1e-9)
    np.testing.assert_allclose(beta_weights(300, 1, 1), shapley_weights(300), rtol=1e-9)
    falling = beta_weights(100, 16, 1)
    assert (np.diff(falling) < 0).all()
    np.testing.assert_allclose(falling[0], 16 / 115, rtol=1e-9)


def test_equal_players_have_equal_values_and_a_dummy_has_its_own_gain() -> None:
    def with_dummy(rows: np.ndarray) -> float:
        return airport(rows[rows < 6]) + 0.25 * float((rows == 6).any())

    for weights in (shapley_weights(7), banzhaf_weights(7), beta_weights(7, 4, 1)):
        result = semivalue(with_dummy, weights).values
        np.testing.assert_allclose(result[6], 0.25, rtol=1e-12)
        np.testing.assert_allclose(result[2], result[3], rtol=1e-12)
    sampled = tmc_shapley(with_dummy, 7, permutations=20, tolerance=0)
    np.testing.assert_allclose(sampled.values[6], 0.25, rtol=1e-12)
    assert sampled.standard_errors[6] < 1e-12


def test_leave_one_out_is_the_loss_without_the_player() -> None:
    result = leave_one_out(airport, 6)
    np.testing.assert_array_equal(result.values, [0, 0, 0, 0, 0, 4])
    assert result.evaluations == 8
    np.testing.assert_array_equal(leave_one_out(majority, 3).values, [1, 0, 0])


Method = Callable[[int, int], Values]
SAMPLED: dict[str, tuple[Method, np.ndarray]] = {
    "shapley": (
        lambda draws, seed: tmc_shapley(airport, 6, permutations=draws, tolerance=0, seed=seed, block_size=draws),
        airport_values(lambda others: 1 / (others + 1)),
    ),
    "beta": (
        lambda draws, seed: beta_shapley(airport, 6, alpha=4, beta=1, permutations=draws, seed=seed, block_size=draws),
        airport_values(beta_absence(4, 1)),
    ),
    "banzhaf": (
        lambda draws, seed: banzhaf(airport, 6, samples=draws, seed=seed, block_size=draws),
        airport_values(lambda others: 0.5**others),
    ),
}


@pytest.mark.parametrize("name", SAMPLED)
def test_sampled_values_are_within_their_standard_errors(name: str) -> None:
    method, exact = SAMPLED[name]
    result = method(3000, 7)
    assert (result.standard_errors > 0).all()
    assert (result.standard_errors < 0.2).all()
    assert (np.abs(result.values - exact) < 4.5 * result.standard_errors).all()
    fewer = method(750, 7)
    np.testing.assert_allclose(fewer.standard_errors / result.standard_errors, 2, rtol=0.25)


@pytest.mark.slow
@pytest.mark.parametrize("name", SAMPLED)
def test_standard_errors_are_calibrated(name: str) -> None:
    method, exact = SAMPLED[name]
    runs = [method(40, seed) for seed in range(100)]
    inside = np.array([np.abs(run.values - exact) < 1.96 * run.standard_errors for run in runs])
    assert 0.91 < inside.mean() < 0.98
    spread = np.std([run.values for run in runs], axis=0, ddof=1)
    reported = np.sqrt(np.mean([run.standard_errors**2 for run in runs], axis=0))
    np.testing.assert_allclose(reported / spread, 1, atol=0.2)
    bias = np.mean([run.values for run in runs], axis=0) - exact
    assert (np.abs(bias) < 4.5 * spread / np.sqrt(len(runs))).all()
