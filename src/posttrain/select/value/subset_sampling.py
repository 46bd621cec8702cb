"""Banzhaf values from random sets of players."""

from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from posttrain.select.value.blocks import Place
from posttrain.select.value.checks import check_positive, check_seed, players_of
from posttrain.select.value.moments import Moments
from posttrain.select.value.set_scores import SetScores
from posttrain.select.value.stopping import Over, Stop
from posttrain.select.value.utilities.utility import Floats, Rows, Utility, utility_key
from posttrain.select.value.values import Values


def banzhaf(
    utility: Utility,
    players: int | None = None,
    *,
    samples: int = 1000,
    standard_error: float | None = None,
    over: Over = "max",
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
    players = players_of(utility, players)
    check_positive(samples=samples, block=block)
    check_seed(seed)
    stop = Stop(standard_error, over)
    members = _Members(players, seed)
    place = Place(workers, folder).of(
        lambda: utility_key(utility), method="banzhaf", version=1, players=players, seed=seed
    )
    with_player, without = Moments(players), Moments(players)
    with closing(place.blocks(SetScores(utility, members), samples, block, "sets")) as blocks:
        for part, found in blocks:
            for number, score in zip(part, found["scores"].tolist(), strict=True):
                inside = members.inside(number)
                with_player.add(score, inside)
                without.add(score, ~inside)
            drawn = part.stop
            if stop.reached(_errors(with_player, without)):
                break
    known = (with_player.count > 0) & (without.count > 0)
    values = np.where(known, with_player.mean - without.mean, np.nan)
    return Values(values, _errors(with_player, without), drawn)


@dataclass(frozen=True)
class _Members:
    players: int
    seed: int

    def inside(self, number: int) -> npt.NDArray[np.bool_]:
        return np.random.default_rng([self.seed, number]).random(self.players) < 0.5

    def __call__(self, number: int) -> Rows:
        return np.flatnonzero(self.inside(number))


def _errors(with_player: Moments, without: Moments) -> Floats:
    """Of differences of means over disjoint samples."""
    return np.hypot(with_player.standard_errors(), without.standard_errors())
