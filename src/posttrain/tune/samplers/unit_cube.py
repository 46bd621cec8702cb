"""Samplers that look at no value: random, quasi-random, and grid."""

from collections.abc import Sequence
from functools import cached_property
from typing import Any, ClassVar

import numpy as np

from posttrain.store.errors import UserError
from posttrain.tune.samplers.base import Directions, Proposal, Sampler
from posttrain.tune.space import Space
from posttrain.tune.trial import Trial

_MAX_SKIPPED = 1_000  # points of a sequence that the constraints exclude, on end


class RandomSampler(Sampler):
    """Draws each trial independently, uniformly over the space (Bergstra and Bengio 2012)."""

    several_objectives: ClassVar[bool] = True

    def propose(self, number: int, trials: Sequence[Trial]) -> Proposal:
        return Proposal(self.space.draw(self.generator(number)))


class QuasiRandomSampler(Sampler):
    """Takes the points of a scrambled Sobol sequence, which cover the space more evenly than random ones (Owen 1998).

    Points that the constraints exclude are skipped.
    """

    several_objectives: ClassVar[bool] = True

    def __init__(self, space: Space, seed: int = 0, maximize: Directions = False) -> None:
        super().__init__(space, seed, maximize)
        self._points = np.empty((0, len(space.parameters)))

    def propose(self, number: int, trials: Sequence[Trial]) -> Proposal:
        # Where the sequence was: the trials before took its feasible points in turn.
        start = next((trial.notes["sobol"] for trial in reversed(trials) if "sobol" in trial.notes), -1) + 1
        for index in range(start, start + _MAX_SKIPPED):
            drawn = self.space.from_unit(self._point(index))
            if self.space.is_feasible(self.space.complete(drawn)):
                return Proposal(drawn, {"sobol": index})
        raise UserError(
            f"hardly a point meets the constraints: none of {_MAX_SKIPPED:,}",
            where="space.constraints",
            fix="narrow the ranges, or derive one value from the others",
        )

    def _point(self, index: int) -> np.ndarray:
        from scipy.stats import qmc

        # Blocks of a power of two, which keep the balance of the sequence; larger ones as it goes on.
        if index >= len(self._points):
            bits = max(6, index.bit_length())
            engine = qmc.Sobol(len(self.space.parameters), rng=np.random.default_rng(self.seed))
            self._points = engine.random_base2(bits)
        point: np.ndarray = self._points[index]
        return point


class GridSampler(Sampler):
    """Tries every point of a grid once, in the order of the entries.

    Optuna's grid tries points again that differ in parameters which do not exist, and knows no constraints.

    Args:
        points: values of each number, evenly spread over its range, the ends included; choices have all theirs.
    """

    several_objectives: ClassVar[bool] = True

    def __init__(self, space: Space, seed: int = 0, maximize: Directions = False, points: int = 3) -> None:
        super().__init__(space, seed, maximize)
        if points < 1:
            raise UserError(f"{points} values make no grid", where="sampler.points", fix="give at least 1")
        self.points = points

    @cached_property
    def _grid(self) -> list[dict[str, Any]]:
        return list(self.space.grid(self.points))

    def propose(self, number: int, trials: Sequence[Trial]) -> Proposal | None:
        at = next((trial.notes["grid"] for trial in reversed(trials) if "grid" in trial.notes), -1) + 1
        return Proposal(self._grid[at], {"grid": at}) if at < len(self._grid) else None
