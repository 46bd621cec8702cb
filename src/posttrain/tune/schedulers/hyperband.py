"""Hyperband (Li et al. 2016, arXiv:1603.06560, Algorithm 1): brackets that begin at different steps."""

import math

from posttrain.tune.schedulers.rungs import Rung, rung_levels, warn_of_warmup
from posttrain.tune.schedulers.successive_halving import BracketScheduler


class Hyperband(BracketScheduler):
    """Runs the brackets s_max, ..., 0 one after another, and begins again.

    Bracket s starts n = ceil((s_max + 1) / (s + 1) eta^s) trials at the step R eta^-s; its rung i has floor(n eta^-i)
    of them.

    Args:
        max_resource: R, the step at which a trial is finished.
        min_resource: the least step of a first rung; 1 in the paper.
        eta: the factor between rungs.

    Raises:
        UserError: the numbers leave no rungs.
    """

    def __init__(self, max_resource: int, min_resource: int = 1, eta: float = 3) -> None:
        super().__init__()
        self.max_resource = max_resource
        self._steps = rung_levels(max_resource, min_resource, eta, "scheduler hyperband")
        self._eta = eta

    def spare_warmup(self, share: float) -> str:
        return warn_of_warmup(self._steps, share)

    def rungs(self, number: int) -> list[Rung]:
        brackets = len(self._steps)
        s = brackets - 1 - number % brackets
        # Rounded first: the quotient of two powers may lie a bit above the integer that it is.
        trials = math.ceil(round(brackets / (s + 1) * self._eta**s, 9))
        return [Rung(max(1, int(trials // self._eta**at)), self._steps[brackets - 1 - s + at]) for at in range(s + 1)]
