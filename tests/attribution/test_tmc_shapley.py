"""Values of games whose solutions have a closed form."""

from collections.abc import Callable

import numpy as np
import pytest

from posttrain.attribution.tmc_shapley import tmc_shapley

COSTS = np.array([1.0, 1.5, 4.0, 4.0, 7.0, 11.0])
RIGHT_GLOVES = 4


class Game:
    """A utility of sets of players that counts the scores."""

    def __init__(self, score: Callable[[np.ndarray], float], players: int) -> None:
        self.score_of, self.players, self.scores = score, players, 0

    def start(self) -> "GameModel":
        return GameModel(self)


class GameModel:
    def __init__(self, game: Game) -> None:
        self.game, self.rows = game, []  # type: ignore[var-annotated]

    def add(self, row: int) -> None:
        self.rows.append(row)

    def score(self) -> float:
        self.game.scores += 1
        return float(self.game.score_of(np.array(self.rows, dtype=np.int64)))


def airport(rows: np.ndarray) -> float:
    """The cost of the runway: that of the largest aircraft."""
    return float(COSTS[rows].max(initial=0))


def majority(rows: np.ndarray) -> float:
    """A weighted majority: weights 2, 1, 1 and a quota of 3."""
    return float(np.array([2, 1, 1])[rows].sum() >= 3)


def gloves(rows: np.ndarray) -> float:
    """One left glove, player 0, and several right ones: a pair is worth 1."""
    left_gloves = int((rows == 0).sum())
    return float(min(left_gloves, len(rows) - left_gloves))


@pytest.mark.slow
def test_values_are_those_of_the_closed_forms() -> None:
    """Within 4.5 standard errors of 3,000 permutations; a marginal contribution is at most the score of all."""
    steps = np.diff(COSTS, prepend=0)
    right = 1 / (RIGHT_GLOVES * (RIGHT_GLOVES + 1))
    exact = {
        airport: np.cumsum([step / (len(COSTS) - position) for position, step in enumerate(steps)]),
        majority: np.array([2 / 3, 1 / 6, 1 / 6]),
        gloves: np.array([RIGHT_GLOVES / (RIGHT_GLOVES + 1), *[right] * RIGHT_GLOVES]),
    }
    for game, values in exact.items():
        whole = game(np.arange(len(values)))
        result = tmc_shapley(Game(game, len(values)), permutations=3000, tolerance=0, seed=7)
        # The variance of marginal contributions in [0, U(all)] with mean v is at most v (U(all) - v).
        assert (np.abs(result - values) < 4.5 * np.sqrt(values * (whole - values) / 3000)).all()


def test_values_sum_to_the_score_of_all_less_that_of_none() -> None:
    worth = np.random.default_rng(0).uniform(0.5, 1.5, 30)
    for permutations in (1, 7, 23):
        game = Game(lambda rows: min(worth[rows].sum(), 11.0) - 3, 30)
        values = tmc_shapley(game, permutations=permutations, tolerance=0, seed=permutations)
        np.testing.assert_allclose(values.sum(), 11.0, rtol=1e-13)
        assert game.scores == permutations * 30 + 2


@pytest.mark.slow
def test_equal_players_have_equal_values_and_a_dummy_has_its_own_gain() -> None:
    def with_dummy(rows: np.ndarray) -> float:
        return airport(rows[rows < 6]) + 0.25 * float((rows == 6).any())

    values = tmc_shapley(Game(with_dummy, 7), permutations=3000, tolerance=0)
    np.testing.assert_allclose(values[6], 0.25, rtol=1e-12)
    np.testing.assert_allclose(values[2], values[3], atol=0.1)


def test_a_permutation_is_truncated_within_the_tolerance() -> None:
    worth = np.random.default_rng(0).uniform(0.5, 1.5, 30)
    game, tolerance = Game(lambda rows: worth[rows].sum(), 30), 3.0
    result = tmc_shapley(game, permutations=1, tolerance=tolerance, seed=3)
    order = np.random.default_rng([3, 0]).permutation(30)
    missing = worth.sum() - worth[order].cumsum()
    evaluated = int((missing >= tolerance).sum()) + 1
    expected = np.zeros(30)
    expected[order[:evaluated]] = worth[order[:evaluated]]
    np.testing.assert_allclose(result, expected, atol=1e-12)
    assert game.scores == evaluated + 2


def test_the_seed_determines_the_values() -> None:
    first, again, other = (tmc_shapley(Game(airport, 6), permutations=6, tolerance=0, seed=seed) for seed in (1, 1, 2))
    np.testing.assert_array_equal(first, again)
    assert (first != other).any()
