"""Semivalues by every set of players: exact, for few players."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from posttrain.select.value.blocks import Place
from posttrain.select.value.checks import check_positive, players_of
from posttrain.select.value.semivalue_weights import shapley_weights
from posttrain.select.value.set_scores import SetScores, all_scores
from posttrain.select.value.utilities.utility import Rows, Utility, utility_key
from posttrain.select.value.values import Values
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
    players = players_of(utility, players)
    _check_players(players)
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
    _check_players(players)
    if not (np.isfinite(counted).all() and (counted >= 0).all() and abs(counted.sum() - 1) < 1e-6):
        raise UserError("weights must be at least 0 and sum to 1")
    players_of(utility, players)
    check_positive(block=block)
    place = Place(workers, folder).of(lambda: utility_key(utility), method="all sets", version=1, players=players)
    scores = all_scores(place, SetScores(utility, _Members(players)), 2**players, block, "all sets")
    sets = np.arange(2**players)
    sizes = np.bitwise_count(sets).astype(np.int64)
    per_set = counted / _choices(players - 1)
    values = np.empty(players)
    for player in range(players):
        without = sets[(sets >> player) & 1 == 0]
        values[player] = (per_set[sizes[without]] * (scores[without | 1 << player] - scores[without])).sum()
    return Values(values, np.zeros(players), len(scores))


@dataclass(frozen=True)
class _Members:
    players: int

    def __call__(self, number: int) -> Rows:
        return np.flatnonzero(number >> np.arange(self.players) & 1)


def _check_players(players: int) -> None:
    if not 1 <= players <= MOST_PLAYERS:
        raise UserError(
            f"exact values take 1 to {MOST_PLAYERS} players, not {players}",
            fix="sample with tmc_shapley, beta_shapley or banzhaf, or group the players",
        )


def _choices(n: int) -> npt.NDArray[np.float64]:
    """C(n, s) for s in 0..n."""
    from scipy.special import comb

    return np.asarray(comb(n, np.arange(n + 1)), dtype=np.float64)
