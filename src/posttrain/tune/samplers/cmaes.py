"""Covariance matrix adaptation (CMA-ES; Hansen 2016, arXiv:1604.00772), over the unit cube of the space.

Optuna's own sampler keeps its state as a pickle in the study's database, which this program does not load. Here the
state follows from the trials: they note the generation and the point that they were drawn from.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from posttrain.store.errors import UserError
from posttrain.store.installation import install_command
from posttrain.tune.parts import check_ranges
from posttrain.tune.samplers.base import Proposal, Sampler
from posttrain.tune.space import Space
from posttrain.tune.trial import SPACE_NOTE, Trial, TrialState

_GENERATION, _POINT, _SOLUTIONS = (SPACE_NOTE + name for name in ("generation", "point", "solutions"))

_SIGMA = 0.3  # first standard deviation, as a share of each range

_MAX_DRAWS = 100  # of one point, until it meets the constraints


class CmaEsSampler(Sampler):
    """Draws generations of trials from a normal distribution that adapts to the best of them.

    Integers and choices are cut from the same real coordinates, so that conditional parameters take part like others.
    A trial whose settings made it fail counts among the worst of its generation, of which the best half moves the
    distribution; so many must have a value, and until then more are drawn.

    Args:
        population: trials of a generation; None: 4 + 3 ln(parameters), as the paper has it.

    Raises:
        UserError: the package cmaes is not installed, or there are fewer than two parameters.
    """

    def __init__(self, space: Space, seed: int = 0, maximize: bool = False, population: int | None = None) -> None:
        super().__init__(space, seed, maximize)
        check_ranges("sampler", {"population": (population or 2, population is None or population >= 2, "at least 2")})
        if len(space.parameters) < 2:
            raise UserError("cmaes needs at least two parameters", where="sampler", fix="use gp or tpe")
        self.population = population
        self._optimizer, self._generation = self._new(), 0

    def propose(self, number: int, trials: Sequence[Trial]) -> Proposal:
        solutions = self._adapt(trials)
        notes = {_SOLUTIONS: solutions} if solutions else {}
        # Only the draw is random: the optimizer's own state follows from the trials.
        self._optimizer._rng.seed(self.generator(number).integers(2**32))
        for _ in range(_MAX_DRAWS):
            point = self._optimizer.ask()
            drawn = self.space.from_unit(point)
            if self.space.is_feasible(self.space.complete(drawn)):
                return Proposal(drawn, {**notes, _GENERATION: self._generation, _POINT: point.tolist()})
        return Proposal(self.space.draw(self.generator(number)), notes)

    def _adapt(self, trials: Sequence[Trial]) -> list[list[float]]:
        """Updates the distribution by each generation that is whole.

        Returns:
            Number and loss of each trial of the generation that has just become whole; empty if none has. They are
            noted, as the losses of trials that run on may be others when the study is resumed.
        """
        points = {trial.number: trial.notes[_POINT] for trial in trials if _POINT in trial.notes}
        history = [trial.notes[_SOLUTIONS] for trial in trials if _SOLUTIONS in trial.notes]
        for solutions in history[self._generation :]:
            self._tell(points, solutions)
        generation = [trial for trial in trials if trial.notes.get(_GENERATION) == self._generation]
        done = [trial for trial in generation if trial.state is not TrialState.RUNNING]
        losses = self.comparable_losses(done)
        if len(losses) < self._optimizer.population_size // 2:
            return []
        members = [[trial.number, losses[trial.number]] for trial in done if trial.number in losses]
        # A number, as it is noted: the order alone counts. Those that a scheduler stopped earlier are among the worst.
        worst = max(losses.values())
        members += [
            [trial.number, worst]
            for trial in done
            if trial.number not in losses and (trial.has_bad_settings or trial.latest is not None)
        ]
        if len(members) < self._optimizer.population_size:
            return []
        solutions = members[: self._optimizer.population_size]
        self._tell(points, solutions)
        return solutions

    def _tell(self, points: Mapping[int, list[float]], solutions: Sequence[Sequence[float]]) -> None:
        self._optimizer.tell([(np.array(points[int(number)]), loss) for number, loss in solutions])
        self._generation += 1

    def _new(self) -> Any:
        try:
            from cmaes import CMA
        except ImportError:
            raise UserError("cmaes is not installed", where="sampler", fix=install_command("cmaes")) from None
        dimensions = len(self.space.parameters)
        return CMA(
            mean=np.full(dimensions, 0.5),
            sigma=_SIGMA,
            bounds=np.array([[0.0, 1.0]] * dimensions),
            seed=0,
            population_size=self.population,
        )
