"""The rungs of successive halving: the steps at which trials are compared."""

import math
from collections.abc import Sequence
from typing import NamedTuple

from posttrain.store.errors import UserError


class Rung(NamedTuple):
    """A rung of a bracket.

    Attributes:
        trials: number of trials that run up to it.
        step: the step up to which they run.
    """

    trials: int
    step: int


def rung_levels(max_resource: int, min_resource: int, eta: float, where: str) -> list[int]:
    """Returns the steps of the rungs, ascending.

    They go down from R, ``max_resource``, in factors of ``eta``: round(R eta^-s) for s up to the greatest with r eta^s
    <= R, where r is ``min_resource``. If R is r times a power of eta, these are the r eta^k of the papers.

    Raises:
        UserError: the numbers leave no rungs.
    """
    check_resources(max_resource, min_resource, where)
    if eta < 2:
        raise UserError(f"eta {eta:g} is less than 2", where=where, fix="2, 3 or 4 are usual")
    levels = [max_resource]
    # By multiplication: quotients of logarithms are not exact.
    while min_resource * eta ** len(levels) <= max_resource:
        levels.append(round(max_resource / eta ** len(levels)))
    return levels[::-1]


def warn_of_warmup(levels: Sequence[int], share: float) -> str:
    """Returns a warning if trials are compared before the share of the last step that is warm-up; empty if not."""
    warmup = round(share * levels[-1], 6)
    if levels[0] >= warmup:
        return ""
    what = f"trials are compared after {levels[0]} of {levels[-1]} parts, and up to {share:.0%} are warm-up"
    return f"{what}: such values mislead; give the scheduler min_resource: {math.ceil(warmup)}"


def check_resources(max_resource: int, min_resource: int, where: str) -> None:
    """Raises a UserError if no step lies between the two."""
    if min_resource < 1 or max_resource < min_resource:
        raise UserError(
            f"no step lies between min_resource {min_resource} and max_resource {max_resource}",
            where=where,
            fix="1 <= min_resource <= max_resource",
        )
