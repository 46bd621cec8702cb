"""Monte Carlo semivalues: TMC-Shapley and Beta-Shapley from permutations, Banzhaf from random sets."""

from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from posttrain.attribution.block_runner import Arrays, BlockRunner, CoalitionScores, empty_and_grand_scores
from posttrain.attribution.moments import ErrorReduction, Moments, StoppingRule
from posttrain.attribution.semivalues import beta_weights, shapley_weights
from posttrain.attribution.utility import (
    Floats,
    Rows,
    Utility,
    check_finite,
    check_positive,
    check_seed,
    resolve_players,
    start_model,
    utility_key,
)
from posttrain.attribution.values import Values
from posttrain.store.errors import UserError

KeySettings = dict[str, str | int | float]


def tmc_shapley(
    utility: Utility,
    players: int | None = None,
    *,
    permutations: int = 500,
    tolerance: float = 0.01,
    patience: int = 1,
    standard_error: float | None = None,
    over: ErrorReduction = "max",
    seed: int = 0,
    block: int = 10,
    workers: int = 1,
    folder: Path | None = None,
) -> Values:
    """Shapley values by truncated Monte Carlo: the mean of marginal contributions in random permutations.

    Ghorbani and Zou, "Data Shapley: equitable valuation of data for machine learning" (ICML 2019, arXiv:1904.02868),
    algorithm 1: a permutation is left, its other players adding 0, once the score of those who have come is closer than
    the tolerance to the score of all. The score itself is compared, as in the algorithm, not a mean of the last
    marginal contributions. Without truncation the values sum to U(all) - U(none), with it to within the tolerance.

    An incremental utility learns one row a step; any other is trained anew at each.

    Args:
        utility: of sets of 0..players-1.
        players: N; the utility's own ``players`` where None.
        permutations: to draw, at most.
        tolerance: in the utility's unit; 0 never truncates.
        patience: scores in a row that must be that close; 1 is the paper's rule. More guard against a score that
            only passes by.
        standard_error: stop after the first block at which the standard errors are at most this.
        over: whether the largest or the mean of the standard errors counts.
        seed: permutation p is drawn from ``numpy.random.default_rng([seed, p])``.
        block: permutations that a worker takes at a time.
        workers: processes; their number changes no digit.
        folder: keeps finished blocks, so that a killed run, or one with more permutations, goes on; the utility needs
            a ``key``.

    Returns:
        Values with the standard errors of means over permutations, which know nothing of the truncation's bias.
        ``evaluations`` counts scores, in permutations that count and of none and all; each is a training unless the
        utility is incremental.

    Raises:
        UserError: a number is out of its range, or the utility gives no finite score.
    """
    if not 0 <= tolerance < np.inf:
        raise UserError(f"tolerance must not be negative, and is {tolerance}")
    check_positive(patience=patience)
    place = BlockRunner(workers, folder)
    settings: KeySettings = {"method": "tmc_shapley", "version": 1, "tolerance": float(tolerance), "patience": patience}
    players = resolve_players(utility, players)
    weights = shapley_weights(players) * players
    truncation = _Truncation(tolerance, patience)
    stop = StoppingRule(standard_error, over)
    return _sample_permutations(utility, weights, truncation, permutations, stop, seed, block, place, settings)


def beta_shapley(
    utility: Utility,
    players: int | None = None,
    *,
    alpha: float = 16.0,
    beta: float = 1.0,
    permutations: int = 500,
    standard_error: float | None = None,
    over: ErrorReduction = "max",
    seed: int = 0,
    block: int = 10,
    workers: int = 1,
    folder: Path | None = None,
) -> Values:
    """Beta(alpha, beta)-Shapley values: marginal contributions in random permutations, weighted by position.

    Kwon and Zou (AISTATS 2022, arXiv:2110.14049); the weights are those of `beta_weights`. In a permutation each player
    joins a set of each size with probability 1/N, so that N times the weight makes the mean unbiased. The default
    counts small sets most, to which a wrong label does most harm.

    The other arguments and the result are those of `tmc_shapley`; nothing is truncated.

    Raises:
        UserError: a number is out of its range, or the utility gives no finite score.
    """
    players = resolve_players(utility, players)
    weights = beta_weights(players, alpha, beta) * players
    settings: KeySettings = {"method": "beta_shapley", "version": 1, "alpha": float(alpha), "beta": float(beta)}
    stop = StoppingRule(standard_error, over)
    place = BlockRunner(workers, folder)
    return _sample_permutations(utility, weights, _Truncation(0.0, 1), permutations, stop, seed, block, place, settings)


@dataclass(frozen=True)
class _Truncation:
    tolerance: float
    patience: int


@dataclass(frozen=True)
class _PermutationMarginals:
    """Moments of the players' weighted marginal contributions; work for `Place.blocks`."""

    utility: Utility
    weights: Floats
    truncation: _Truncation
    seed: int
    none: float
    all: float

    def __call__(self, part: range) -> Arrays:
        moments = Moments(len(self.weights))
        steps = 0
        for number in part:
            order = np.random.default_rng([self.seed, number]).permutation(len(self.weights))
            marginals, taken = self._marginals(order)
            moments.add(marginals)
            steps += taken
        return {**moments.arrays(), "evaluations": np.array(steps)}

    def _marginals(self, order: Rows) -> tuple[Floats, int]:
        """Float64 [N] by player, and how many scores they took."""
        marginals = np.zeros(len(order))
        growing, before, close = start_model(self.utility), self.none, 0
        for position, player in enumerate(order.tolist()):
            close = close + 1 if abs(self.all - before) < self.truncation.tolerance else 0
            if close >= self.truncation.patience:
                return marginals, position
            growing.add(player)
            score = check_finite(growing.score())
            marginals[player] = self.weights[position] * (score - before)
            before = score
        return marginals, len(order)


def _sample_permutations(
    utility: Utility,
    weights: Floats,
    truncation: _Truncation,
    permutations: int,
    stop: StoppingRule,
    seed: int,
    block: int,
    place: BlockRunner,
    settings: KeySettings,
) -> Values:
    check_positive(permutations=permutations, block=block)
    check_seed(seed)
    players = len(weights)
    own = place.of(lambda: utility_key(utility), **settings, players=players, seed=seed)
    none, whole = empty_and_grand_scores(utility, players, place)
    work = _PermutationMarginals(utility, weights, truncation, seed, none, whole)
    moments, evaluations = Moments(players), 2
    with closing(own.blocks(work, permutations, block, "permutations")) as blocks:
        for _, found in blocks:
            moments.merge(Moments.of(found))
            evaluations += int(found["evaluations"])
            if stop.reached(moments.standard_errors()):
                break
    return Values(moments.mean, moments.standard_errors(), evaluations)


def banzhaf(
    utility: Utility,
    players: int | None = None,
    *,
    samples: int = 1000,
    standard_error: float | None = None,
    over: ErrorReduction = "max",
    seed: int = 0,
    block: int = 50,
    workers: int = 1,
    folder: Path | None = None,
) -> Values:
    """Banzhaf values by maximum sample reuse: mean score of sampled sets with a player, less that of those without.

    Wang and Jia, "Data Banzhaf: a robust data valuation framework for machine learning" (AISTATS 2023,
    arXiv:2205.15466): every set, each player in it with probability one half, serves all players.

    Args:
        utility: of sets of 0..players-1.
        players: N; the utility's own ``players`` where None.
        samples: sets to draw, at most.
        standard_error: stop after the first block at which the standard errors are at most this.
        over: whether the largest or the mean of the standard errors counts.
        seed: set s is drawn from ``numpy.random.default_rng([seed, s])``.
        block: sets that a worker takes at a time.
        workers: processes; their number changes no digit.
        folder: keeps finished blocks, so that a killed run, or one with more samples, goes on; the utility needs a
            ``key``.

    Returns:
        Values, NaN for a player whom too few sets were drawn with or without. ``evaluations`` is the number of sets.

    Raises:
        UserError: a number is out of its range, or the utility gives no finite score.
    """
    players = resolve_players(utility, players)
    check_positive(samples=samples, block=block)
    check_seed(seed)
    stop = StoppingRule(standard_error, over)
    members = _RandomCoalitions(players, seed)
    place = BlockRunner(workers, folder).of(
        lambda: utility_key(utility), method="banzhaf", version=1, players=players, seed=seed
    )
    with_player, without = Moments(players), Moments(players)
    with closing(place.blocks(CoalitionScores(utility, members), samples, block, "sets")) as blocks:
        for part, found in blocks:
            for number, score in zip(part, found["scores"].tolist(), strict=True):
                inside = members.inside(number)
                with_player.add(score, inside)
                without.add(score, ~inside)
            drawn = part.stop
            if stop.reached(_difference_errors(with_player, without)):
                break
    known = (with_player.count > 0) & (without.count > 0)
    values = np.where(known, with_player.mean - without.mean, np.nan)
    return Values(values, _difference_errors(with_player, without), drawn)


@dataclass(frozen=True)
class _RandomCoalitions:
    players: int
    seed: int

    def inside(self, number: int) -> npt.NDArray[np.bool_]:
        return np.random.default_rng([self.seed, number]).random(self.players) < 0.5

    def __call__(self, number: int) -> Rows:
        return np.flatnonzero(self.inside(number))


def _difference_errors(with_player: Moments, without: Moments) -> Floats:
    """Of differences of means over disjoint samples."""
    return np.hypot(with_player.standard_errors(), without.standard_errors())
