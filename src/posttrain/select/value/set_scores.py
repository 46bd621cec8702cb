"""Scores of many sets of players."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from posttrain.select.value.blocks import Arrays, Place
from posttrain.select.value.checks import check_finite
from posttrain.select.value.utilities.utility import Floats, Rows, Utility, utility_key


@dataclass(frozen=True)
class SetScores:
    """Scores of numbered sets; work for `Place.blocks`.

    Attributes:
        rows_of: the players of a number's set.
    """

    utility: Utility
    rows_of: Callable[[int], Rows]

    def __call__(self, part: range) -> Arrays:
        return {"scores": np.array([check_finite(self.utility(self.rows_of(number))) for number in part])}


@dataclass(frozen=True)
class _Ends:
    players: int

    def __call__(self, number: int) -> Rows:
        return np.arange(self.players if number else 0)


def end_scores(utility: Utility, players: int, place: Place) -> tuple[float, float]:
    """The scores of no players and of all: two evaluations, which every method finds again in a folder."""
    place = place.of(lambda: utility_key(utility), method="ends", players=players)
    scores = all_scores(place, SetScores(utility, _Ends(players)), 2, 2, "whole set")
    return float(scores[0]), float(scores[1])


def all_scores(place: Place, work: SetScores, total: int, block: int, description: str) -> Floats:
    """Scores of the sets 0..total-1, float64 [total]."""
    scores = np.empty(total)
    for part, found in place.blocks(work, total, block, description):
        scores[part.start : part.stop] = found["scores"]
    return scores
