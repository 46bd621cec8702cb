"""What a model loses without one record."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from posttrain.select.value.blocks import Place
from posttrain.select.value.checks import check_positive, players_of
from posttrain.select.value.set_scores import SetScores, all_scores, end_scores
from posttrain.select.value.utilities.utility import Rows, Utility, utility_key
from posttrain.select.value.values import Values


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
    players = players_of(utility, players)
    check_positive(block=block)
    place = Place(workers, folder)
    own = place.of(lambda: utility_key(utility), method="leave_one_out", version=1, players=players)
    _, whole = end_scores(utility, players, place)
    without = all_scores(own, SetScores(utility, _Others(players)), players, block, "leaving one out")
    return Values(whole - without, np.zeros(players), players + 2)


@dataclass(frozen=True)
class _Others:
    players: int

    def __call__(self, number: int) -> Rows:
        return np.delete(np.arange(self.players), number)
