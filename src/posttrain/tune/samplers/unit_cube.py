"""Samplers that look at no value: random, quasi-random, and grid."""

from collections.abc import Sequence
from itertools import islice
from typing import Annotated, Any, ClassVar

import numpy as np
from pydantic import Field

from posttrain.store.errors import UserError
from posttrain.tune.samplers.base import Directions, Proposal, Sampler
from posttrain.tune.space import MAX_DRAWS, Space
from posttrain.tune.trial import Trial

_SOBOL, _GRID = "sobol", "grid"  # a trial's index in the sequence, and in the grid


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
        start = next((trial.notes[_SOBOL] for trial in reversed(trials) if _SOBOL in trial.notes), -1) + 1
        for index in range(start, start + MAX_DRAWS):
            drawn = self.space.from_unit(self._point(index))
            if self.space.is_feasible(self.space.complete(drawn)):
                return Proposal(drawn, {_SOBOL: index})
        raise self.space.hardly_feasible(MAX_DRAWS)

    def _point(self, index: int) -> np.ndarray:
        from scipy.stats import qmc

        # Blocks of a power of two, which keep the balance of the sequence; larger ones later on.
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

    def __init__(
        self, space: Space, seed: int = 0, maximize: Directions = False, points: Annotated[int, Field(ge=1)] = 3
    ) -> None:
        super().__init__(space, seed, maximize)
        self.points = points

        # Lazily: a grid over twelve parameters has half a million points, of which a study tries a hundred.
        self._rest, self._points = space.grid(points), list[dict[str, Any]]()

    def propose(self, number: int, trials: Sequence[Trial]) -> Proposal | None:
        at = next((trial.notes[_GRID] for trial in reversed(trials) if _GRID in trial.notes), -1) + 1
        self._points += islice(self._rest, max(0, at + 1 - len(self._points)))
        if not self._points:
            what = "no point of the grid meets the constraints"
            raise UserError(what, where="sampler", fix="give more points, or use quasi_random")
        return Proposal(self._points[at], {_GRID: at}) if at < len(self._points) else None
