"""Exact semivalues: Shapley, Beta-Shapley and Banzhaf weights over every set of players, and leave-one-out."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from posttrain.attribution.block_runner import BlockRunner, CoalitionScores, coalition_scores, empty_and_grand_scores
from posttrain.attribution.utility import Rows, Utility, check_positive, resolve_players, utility_key
from posttrain.attribution.values import Floats, Values
from posttrain.store.errors import UserError

MOST_PLAYERS = 20  # 2^20 evaluations


def shapley(
    utility: Utility, players: int | None = None, *, block_size: int = 256, workers: int = 1, folder: Path | None = None
) -> Values:
    """Computes exact Shapley values: a player's marginal contribution, averaged over all orders of the players.

    L. S. Shapley, "A value for n-person games" (1953). The values sum to U(all) - U(none).

    Args:
        utility: utility of sets of 0..players-1.
        players: n, at most 20, as there are 2^n sets to evaluate; the utility's own ``players`` where None.
        block_size: sets that a worker takes at a time.
        workers: number of processes; it changes no digit.
        folder: caches finished blocks, so that a killed run resumes; the utility needs a ``key``.

    Raises:
        UserError: there are too many players or none, or the utility gives no finite score.
    """
    players = resolve_players(utility, players)
    _check_player_count(players)
    return semivalue(utility, shapley_weights(players), block_size=block_size, workers=workers, folder=folder)


def semivalue(
    utility: Utility,
    weights: npt.ArrayLike,
    *,
    block_size: int = 256,
    workers: int = 1,
    folder: Path | None = None,
) -> Values:
    """Computes an exact semivalue: the mean marginal contribution to the sets of each size, weighted by size.

    Dubey, Neyman and Weber, "Value theory without efficiency" (Mathematics of Operations Research, 1981).

    Args:
        weights: float64 [n] by the size of the set joined, 0..n-1, at least 0 and summing to 1, such as of
            `beta_weights` and `banzhaf_weights`.

    The other arguments are those of `shapley`.

    Raises:
        UserError: as `shapley`, or the weights do not fit.
    """
    by_size = np.asarray(weights, dtype=np.float64)
    players = len(by_size) if by_size.ndim == 1 else 0
    _check_player_count(players)
    if not (np.isfinite(by_size).all() and (by_size >= 0).all() and abs(by_size.sum() - 1) < 1e-6):
        raise UserError("weights must be at least 0 and sum to 1")
    resolve_players(utility, players)
    check_positive(block_size=block_size)
    runner = BlockRunner(workers, folder).for_method(
        lambda: utility_key(utility), method="all sets", version=1, players=players
    )
    work = CoalitionScores(utility, _EveryCoalition(players))
    scores = coalition_scores(runner, work, 2**players, block_size, "all sets")
    sets = np.arange(2**players)
    sizes = np.bitwise_count(sets).astype(np.int64)
    # A size's weight is shared by the C(n-1, s) sets of that size.
    per_set = by_size / _binomials(players - 1)
    values = np.empty(players)
    for player in range(players):
        # A set is a number whose bit p is set for player p: with the player it is the number plus 2^p.
        without = sets[(sets >> player) & 1 == 0]
        values[player] = (per_set[sizes[without]] * (scores[without | 1 << player] - scores[without])).sum()
    return Values(values, np.zeros(players), len(scores))


@dataclass(frozen=True)
class _EveryCoalition:
    players: int

    def __call__(self, number: int) -> Rows:
        return np.flatnonzero(number >> np.arange(self.players) & 1)


def _check_player_count(players: int) -> None:
    if not 1 <= players <= MOST_PLAYERS:
        raise UserError(
            f"exact values take 1 to {MOST_PLAYERS} players, not {players}",
            fix="sample with tmc_shapley, beta_shapley or banzhaf, or group the players",
        )


def _binomials(n: int) -> npt.NDArray[np.float64]:
    """Returns C(n, s) for s in 0..n."""
    from scipy.special import comb

    return np.asarray(comb(n, np.arange(n + 1)), dtype=np.float64)


def shapley_weights(players: int) -> Floats:
    """Returns 1/n for every size: float64 [n] by the size of the set joined, 0..n-1, summing to 1 as all here."""
    check_positive(players=players)
    return np.full(players, 1 / players)


def banzhaf_weights(players: int) -> Floats:
    """Returns C(n-1, s) / 2^(n-1): every set counts the same."""
    from scipy.special import gammaln

    check_positive(players=players)
    sizes = np.arange(players)
    # By logarithms: the binomials overflow float64 from about a thousand players on.
    logarithms = gammaln(players) - gammaln(sizes + 1) - gammaln(players - sizes) - (players - 1) * np.log(2)
    weights: Floats = np.exp(logarithms)
    return weights


def beta_weights(players: int, alpha: float, beta: float) -> Floats:
    """Returns C(n-1, s) B(s + beta, n - 1 - s + alpha) / B(alpha, beta), of Beta(alpha, beta)-Shapley.

    Kwon and Zou, "Beta Shapley: a unified and noise-reduced data valuation framework for machine learning" (AISTATS
    2022, arXiv:2110.14049), whose weights are n times these and whose j is s + 1. A large alpha counts small sets
    more; (1, 1) is Shapley's.

    Raises:
        UserError: alpha or beta is not positive.
    """
    from scipy.special import betaln, gammaln

    check_positive(players=players)
    if not (0 < alpha < np.inf and 0 < beta < np.inf):
        raise UserError(f"alpha and beta must be positive, and are {alpha} and {beta}")
    sizes = np.arange(players)
    binomials = gammaln(players) - gammaln(sizes + 1) - gammaln(players - sizes)
    # By logarithms, as in `banzhaf_weights`.
    logarithms = binomials + betaln(sizes + beta, players - 1 - sizes + alpha) - betaln(alpha, beta)
    weights: Floats = np.exp(logarithms)
    return weights


def leave_one_out(
    utility: Utility, players: int | None = None, *, block_size: int = 50, workers: int = 1, folder: Path | None = None
) -> Values:
    """Computes U(all) - U(all but the player): exact, with N + 2 evaluations.

    Args:
        utility: utility of sets of 0..players-1.
        players: N; the utility's own ``players`` if None.
        block_size: evaluations that a worker takes at a time.
        workers: number of processes; it changes no digit.
        folder: caches finished blocks, so that a killed run resumes; the utility needs a ``key``.

    Raises:
        UserError: a number is out of its range, or the utility gives no finite score.
    """
    players = resolve_players(utility, players)
    check_positive(block_size=block_size)
    runner = BlockRunner(workers, folder)
    own_runner = runner.for_method(lambda: utility_key(utility), method="leave_one_out", version=1, players=players)
    _, whole = empty_and_grand_scores(utility, players, runner)
    work = CoalitionScores(utility, _LeaveOneOutCoalitions(players))
    without = coalition_scores(own_runner, work, players, block_size, "leaving one out")
    return Values(whole - without, np.zeros(players), players + 2)


@dataclass(frozen=True)
class _LeaveOneOutCoalitions:
    players: int

    def __call__(self, number: int) -> Rows:
        return np.delete(np.arange(self.players), number)
