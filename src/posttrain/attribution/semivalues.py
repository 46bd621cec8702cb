"""Exact semivalues: Shapley, Beta-Shapley and Banzhaf weights over every set of players, and leave-one-out."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from posttrain.attribution.block_runner import BlockRunner, CoalitionScores, coalition_scores, empty_and_grand_scores
from posttrain.attribution.utility import Floats, Rows, Utility, check_positive, resolve_players, utility_key
from posttrain.attribution.values import Values
from posttrain.store.errors import UserError

MOST_PLAYERS = 20


def shapley(
    utility: Utility, players: int | None = None, *, block: int = 256, workers: int = 1, folder: Path | None = None
) -> Values:
    """Exact Shapley values: a player's marginal contribution, averaged over all orders in which players may come.

    L. S. Shapley, "A value for n-person games" (1953). The values sum to U(all) - U(none).

    Args:
        utility: of sets of 0..players-1.
        players: n, at most 20, as there are 2^n sets to evaluate; the utility's own ``players`` where None.
        block: sets that a worker takes at a time.
        workers: processes; their number changes no digit.
        folder: keeps finished blocks, so that a killed run goes on; the utility needs a ``key``.

    Raises:
        UserError: there are too many players or none, or the utility gives no finite score.
    """
    players = resolve_players(utility, players)
    _check_player_count(players)
    return semivalue(utility, shapley_weights(players), block=block, workers=workers, folder=folder)


def semivalue(
    utility: Utility,
    weights: npt.ArrayLike,
    *,
    block: int = 256,
    workers: int = 1,
    folder: Path | None = None,
) -> Values:
    """Exact semivalue: the mean marginal contribution to the sets of each size, weighted by size.

    Dubey, Neyman and Weber, "Value theory without efficiency" (Mathematics of Operations Research, 1981).

    Args:
        weights: float64 [n] by the size of the set joined, 0..n-1, at least 0 and summing to 1, such as of
            `beta_weights` and `banzhaf_weights`.

    The other arguments are those of `shapley`.

    Raises:
        UserError: as `shapley`, or the weights are no such weights.
    """
    counted = np.asarray(weights, dtype=np.float64)
    players = len(counted) if counted.ndim == 1 else 0
    _check_player_count(players)
    if not (np.isfinite(counted).all() and (counted >= 0).all() and abs(counted.sum() - 1) < 1e-6):
        raise UserError("weights must be at least 0 and sum to 1")
    resolve_players(utility, players)
    check_positive(block=block)
    place = BlockRunner(workers, folder).of(lambda: utility_key(utility), method="all sets", version=1, players=players)
    scores = coalition_scores(place, CoalitionScores(utility, _EveryCoalition(players)), 2**players, block, "all sets")
    sets = np.arange(2**players)
    sizes = np.bitwise_count(sets).astype(np.int64)
    per_set = counted / _binomials(players - 1)
    values = np.empty(players)
    for player in range(players):
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
    """C(n, s) for s in 0..n."""
    from scipy.special import comb

    return np.asarray(comb(n, np.arange(n + 1)), dtype=np.float64)


def shapley_weights(players: int) -> Floats:
    """Every size alike, 1/n: float64 [n] by the size of the set joined, 0..n-1, summing to 1 as all here."""
    check_positive(players=players)
    return np.full(players, 1 / players)


def banzhaf_weights(players: int) -> Floats:
    """Every set alike: a size counts C(n-1, s) / 2^(n-1)."""
    from scipy.special import gammaln

    check_positive(players=players)
    sizes = np.arange(players)
    logarithms = gammaln(players) - gammaln(sizes + 1) - gammaln(players - sizes) - (players - 1) * np.log(2)
    weights: Floats = np.exp(logarithms)
    return weights


def beta_weights(players: int, alpha: float, beta: float) -> Floats:
    """C(n-1, s) B(s + beta, n - 1 - s + alpha) / B(alpha, beta): Beta(alpha, beta)-Shapley.

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
    choices = gammaln(players) - gammaln(sizes + 1) - gammaln(players - sizes)
    logarithms = choices + betaln(sizes + beta, players - 1 - sizes + alpha) - betaln(alpha, beta)
    weights: Floats = np.exp(logarithms)
    return weights


def leave_one_out(
    utility: Utility, players: int | None = None, *, block: int = 50, workers: int = 1, folder: Path | None = None
) -> Values:
    """U(all) - U(all but the player): exact, with N + 2 evaluations.

    Args:
        utility: of sets of 0..players-1.
        players: N; the utility's own ``players`` where None.
        block: evaluations that a worker takes at a time.
        workers: processes; their number changes no digit.
        folder: keeps finished blocks, so that a killed run goes on; the utility needs a ``key``.

    Raises:
        UserError: a number is out of its range, or the utility gives no finite score.
    """
    players = resolve_players(utility, players)
    check_positive(block=block)
    place = BlockRunner(workers, folder)
    own = place.of(lambda: utility_key(utility), method="leave_one_out", version=1, players=players)
    _, whole = empty_and_grand_scores(utility, players, place)
    without = coalition_scores(
        own, CoalitionScores(utility, _LeaveOneOutCoalitions(players)), players, block, "leaving one out"
    )
    return Values(whole - without, np.zeros(players), players + 2)


@dataclass(frozen=True)
class _LeaveOneOutCoalitions:
    players: int

    def __call__(self, number: int) -> Rows:
        return np.delete(np.arange(self.players), number)
