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
    Rows,
    Utility,
    check_finite,
    check_positive,
    check_seed,
    resolve_players,
    start_model,
    utility_key,
)
from posttrain.attribution.values import Floats, Values
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
    reduction: ErrorReduction = "max",
    seed: int = 0,
    block_size: int = 10,
    workers: int = 1,
    folder: Path | None = None,
) -> Values:
    """Estimates Shapley values by truncated Monte Carlo: the mean of marginal contributions in random permutations.

    Ghorbani and Zou, "Data Shapley: equitable valuation of data for machine learning" (ICML 2019, arXiv:1904.02868),
    algorithm 1: a permutation is truncated, its remaining players adding 0, once the score of those who have joined is
    closer than the tolerance to the score of all. Without truncation the values sum to U(all) - U(none), with it to
    within the tolerance.

    An incremental utility adds one row a step; any other trains from scratch at each step.

    Args:
        utility: utility of sets of 0..players-1.
        players: N; the utility's own ``players`` if None.
        permutations: most permutations to draw.
        tolerance: distance to the score of all, in the utility's unit; 0 never truncates.
        patience: consecutive scores that must be that close; 1 is the paper's rule. A larger one guards against a
            score that only passes through the band.
        standard_error: stop after the first block at which the standard errors are at most this.
        reduction: the ``max`` or the ``mean`` of the standard errors must be small.
        seed: permutation p is drawn from ``numpy.random.default_rng([seed, p])``.
        block_size: permutations that a worker takes at a time.
        workers: number of processes; it changes no digit.
        folder: caches finished blocks, so that a killed run resumes, as does one with more permutations; the utility
            needs a ``key``.

    Returns:
        Values with the standard errors of means over permutations, without the truncation's bias.
        ``evaluations`` counts scores, in permutations that count and of none and all; each is a training unless the
        utility is incremental.

    Raises:
        UserError: a number is out of its range, or the utility gives no finite score.
    """
    if not 0 <= tolerance < np.inf:
        raise UserError(f"tolerance must not be negative, and is {tolerance}")
    check_positive(patience=patience)
    runner = BlockRunner(workers, folder)
    settings: KeySettings = {"method": "tmc_shapley", "version": 1, "tolerance": float(tolerance), "patience": patience}
    players = resolve_players(utility, players)
    # Times N, as in `beta_shapley`: all weights are 1.
    weights = shapley_weights(players) * players
    truncation = _Truncation(tolerance, patience)
    stop = StoppingRule(standard_error, reduction)
    return _sample_permutations(utility, weights, truncation, permutations, stop, seed, block_size, runner, settings)


def beta_shapley(
    utility: Utility,
    players: int | None = None,
    *,
    alpha: float = 16.0,
    beta: float = 1.0,
    permutations: int = 500,
    standard_error: float | None = None,
    reduction: ErrorReduction = "max",
    seed: int = 0,
    block_size: int = 10,
    workers: int = 1,
    folder: Path | None = None,
) -> Values:
    """Estimates Beta(alpha, beta)-Shapley values: marginal contributions in random permutations, weighted by position.

    Kwon and Zou (AISTATS 2022, arXiv:2110.14049); the weights are those of `beta_weights`. The default counts small
    sets most, to which a wrong label does most harm.

    The other arguments and the result are those of `tmc_shapley`; nothing is truncated.

    Raises:
        UserError: a number is out of its range, or the utility gives no finite score.
    """
    players = resolve_players(utility, players)
    # Times N, as in a permutation a player joins a set of each size with probability 1/N.
    weights = beta_weights(players, alpha, beta) * players
    settings: KeySettings = {"method": "beta_shapley", "version": 1, "alpha": float(alpha), "beta": float(beta)}
    stop = StoppingRule(standard_error, reduction)
    runner = BlockRunner(workers, folder)
    return _sample_permutations(
        utility, weights, _Truncation(0.0, 1), permutations, stop, seed, block_size, runner, settings
    )


@dataclass(frozen=True)
class _Truncation:
    tolerance: float
    patience: int


@dataclass(frozen=True)
class _PermutationMarginals:
    """Moments of the players' weighted marginal contributions; work for `BlockRunner.run`."""

    utility: Utility
    weights: Floats
    truncation: _Truncation
    seed: int
    empty_score: float
    grand_score: float

    def __call__(self, block: range) -> Arrays:
        moments = Moments(len(self.weights))
        evaluations = 0
        for number in block:
            # A generator for each permutation: it is the same in whichever block and process it is drawn.
            order = np.random.default_rng([self.seed, number]).permutation(len(self.weights))
            marginals, scores = self._marginals(order)
            moments.add(marginals)
            evaluations += scores
        return {**moments.arrays(), "evaluations": np.array(evaluations)}

    def _marginals(self, order: Rows) -> tuple[Floats, int]:
        """Returns the marginal contributions, float64 [N] by player, and the number of scores computed."""
        marginals = np.zeros(len(order))
        model, before, close = start_model(self.utility), self.empty_score, 0
        for position, player in enumerate(order.tolist()):
            # The score itself is compared, as in algorithm 1, and not a mean of the last marginal contributions.
            close = close + 1 if abs(self.grand_score - before) < self.truncation.tolerance else 0
            if close >= self.truncation.patience:
                return marginals, position
            model.add(player)
            score = check_finite(model.score())
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
    block_size: int,
    runner: BlockRunner,
    settings: KeySettings,
) -> Values:
    check_positive(permutations=permutations, block_size=block_size)
    check_seed(seed)
    players = len(weights)
    own_runner = runner.for_method(lambda: utility_key(utility), **settings, players=players, seed=seed)
    empty, grand = empty_and_grand_scores(utility, players, runner)
    work = _PermutationMarginals(utility, weights, truncation, seed, empty, grand)
    moments, evaluations = Moments(players), 2
    # Closed on an early stop, which ends the processes that compute blocks nobody needs.
    with closing(own_runner.run(work, permutations, block_size, "permutations")) as results:
        for _, result in results:
            moments.merge(Moments.from_arrays(result))
            evaluations += int(result["evaluations"])
            if stop.reached(moments.standard_errors()):
                break
    return Values(moments.mean, moments.standard_errors(), evaluations)


def banzhaf(
    utility: Utility,
    players: int | None = None,
    *,
    samples: int = 1000,
    standard_error: float | None = None,
    reduction: ErrorReduction = "max",
    seed: int = 0,
    block_size: int = 50,
    workers: int = 1,
    folder: Path | None = None,
) -> Values:
    """Estimates Banzhaf values by maximum sample reuse: the mean score of sets with a player, less that without.

    Wang and Jia, "Data Banzhaf: a robust data valuation framework for machine learning" (AISTATS 2023,
    arXiv:2205.15466). A set holds each player with probability one half.

    Args:
        utility: utility of sets of 0..players-1.
        players: N; the utility's own ``players`` if None.
        samples: most sets to draw.
        standard_error: stop after the first block at which the standard errors are at most this.
        reduction: the ``max`` or the ``mean`` of the standard errors must be small.
        seed: set s is drawn from ``numpy.random.default_rng([seed, s])``.
        block_size: sets that a worker takes at a time.
        workers: number of processes; it changes no digit.
        folder: caches finished blocks, so that a killed run resumes, as does one with more samples; the utility needs
            a ``key``.

    Returns:
        Values, NaN for a player with too few sets on either side. ``evaluations`` is the number of sets.

    Raises:
        UserError: a number is out of its range, or the utility gives no finite score.
    """
    players = resolve_players(utility, players)
    check_positive(samples=samples, block_size=block_size)
    check_seed(seed)
    stop = StoppingRule(standard_error, reduction)
    coalitions = _RandomCoalitions(players, seed)
    runner = BlockRunner(workers, folder).for_method(
        lambda: utility_key(utility), method="banzhaf", version=1, players=players, seed=seed
    )
    with_player, without = Moments(players), Moments(players)
    with closing(runner.run(CoalitionScores(utility, coalitions), samples, block_size, "sets")) as results:
        for block, result in results:
            for number, score in zip(block, result["scores"].tolist(), strict=True):
                member = coalitions.mask(number)
                # Maximum sample reuse: one evaluation updates every player, on one side or the other.
                with_player.add(score, member)
                without.add(score, ~member)
            evaluations = block.stop
            if stop.reached(_difference_errors(with_player, without)):
                break
    # Of few sets a player may be in all or in none, and a difference to no mean is no value.
    sampled = (with_player.count > 0) & (without.count > 0)
    values = np.where(sampled, with_player.mean - without.mean, np.nan)
    return Values(values, _difference_errors(with_player, without), evaluations)


@dataclass(frozen=True)
class _RandomCoalitions:
    players: int
    seed: int

    def mask(self, number: int) -> npt.NDArray[np.bool_]:
        return np.random.default_rng([self.seed, number]).random(self.players) < 0.5

    def __call__(self, number: int) -> Rows:
        return np.flatnonzero(self.mask(number))


def _difference_errors(with_player: Moments, without: Moments) -> Floats:
    """Returns the standard errors of differences of means over disjoint samples."""
    return np.hypot(with_player.standard_errors(), without.standard_errors())
