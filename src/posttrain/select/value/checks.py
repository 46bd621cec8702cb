"""What every method checks before it works."""

import numpy as np

from posttrain.select.value.utilities.utility import Utility
from posttrain.store.errors import UserError


def check_positive(**numbers: int) -> None:
    """Raises UserError: one of them is less than 1."""
    for name, number in numbers.items():
        if number < 1:
            raise UserError(f"{name} must be at least 1, and is {number}")


def players_of(utility: Utility, players: int | None) -> int:
    """How many players there are, by the call or by the utility's own ``players``.

    Raises:
        UserError: there is no number, it is less than 1, or the two differ.
    """
    own = getattr(utility, "players", None)
    if players is None:
        if own is None:
            raise UserError("the utility does not tell the number of players", fix="give players")
        return int(own)
    check_positive(players=players)
    if own is not None and own != players:
        raise UserError(f"the utility has {own} players, not {players}")
    return players


def check_seed(seed: int) -> None:
    """Raises UserError: it is negative."""
    if seed < 0:
        raise UserError(f"seed must not be negative, and is {seed}")


def check_finite(score: float) -> float:
    """The score, a float.

    Raises:
        UserError: it is no finite number.
    """
    if not np.isfinite(score):
        raise UserError(f"the utility scored {score}", fix="it must give a finite number for every set")
    return float(score)
