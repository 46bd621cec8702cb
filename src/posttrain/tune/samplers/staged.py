"""A staged search: a coarse grid, points in the part of the space that it leaves, and a model over that part."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Annotated, Any

import numpy as np
from pydantic import Field

from posttrain.store.errors import UserError
from posttrain.tune.parameters import Choice, Float, Int
from posttrain.tune.samplers.base import Proposal, Sampler
from posttrain.tune.samplers.registry import tpe
from posttrain.tune.samplers.unit_cube import QuasiRandomSampler
from posttrain.tune.space import Space
from posttrain.tune.trial import Trial

_STAGE, _RANGES = "stage", "ranges"
"""The notes of a trial with its stage, and with the refined ranges, by parameter."""

_POINTS = 3  # values of each number on the grid

_SHARE = 0.25  # of the coarse trials, the best, that the refined ranges hold

_LISTED = 10_000  # points of a grid, above which its points are drawn one by one

_MAX_DRAWS = 100  # for each point of the first stage


class StagedSampler(Sampler):
    """Searches in three stages.

    1. ``coarse`` points of a grid with three values of each number, in a random order, or all of them.
    2. Each number's range becomes that of the best quarter of these trials, widened by half the distance of the grid's
       points on both sides; ``refined`` quasi-random points of it follow.
    3. TPE over the refined ranges, given all trials that lie in them.

    Choices keep all their values. Where the refined ranges leave no point that meets the conditions and constraints,
    the whole space is searched.

    Args:
        coarse: trials of the first stage.
        refined: trials of the second.
    """

    def __init__(
        self,
        space: Space,
        seed: int = 0,
        maximize: bool = False,
        coarse: Annotated[int, Field(ge=2)] = 12,
        refined: Annotated[int, Field(ge=0)] = 8,
    ) -> None:
        super().__init__(space, seed, maximize)
        self._coarse, self._refined = coarse, refined

    def propose(self, number: int, trials: Sequence[Trial]) -> Proposal | None:
        # By what the trials note, as some of them may be of another sampler.
        stages = [trial.notes.get(_STAGE) for trial in trials]
        if (count := stages.count("coarse")) < len(self._grid):
            return Proposal(self._grid[count], {_STAGE: "coarse"})
        ranges = next((trial.notes[_RANGES] for trial in trials if _RANGES in trial.notes), None)
        # Noted once, as coarse trials that run on may change their values.
        notes = {} if ranges is not None else {_RANGES: self._best_ranges(trials)}
        space = self._refined_space(notes[_RANGES] if ranges is None else ranges)
        if stages.count("refined") < self._refined:
            members = [trial for trial in trials if trial.notes.get(_STAGE) == "refined"]
            proposal = QuasiRandomSampler(space, self.seed, self.maximize).propose(number, members)
            return Proposal(proposal.drawn, {**proposal.notes, **notes, _STAGE: "refined"})
        # Numbered again, as Optuna takes a trial's number for its place in the study.
        inside = [trial for trial in trials if trial.settings in space]
        inside = [replace(trial, number=index) for index, trial in enumerate(inside)]
        model = tpe(space, self.seed, self.maximize, startup=0).propose(len(inside), inside)
        assert model is not None
        return Proposal(model.drawn, {**notes, _STAGE: "model"})

    @cached_property
    def _grid(self) -> list[dict[str, Any]]:
        """The points of the first stage."""
        generator = np.random.default_rng(self.seed)
        axes = {name: parameter.grid(_POINTS) for name, parameter in self.space.parameters.items()}
        if math.prod(map(len, axes.values())) <= _LISTED:
            points = list(self.space.grid(_POINTS))
            return [points[index] for index in generator.permutation(len(points))[: self._coarse]]
        drawn: dict[str, dict[str, Any]] = {}
        for _ in range(_MAX_DRAWS * self._coarse):
            point = self.space.complete({name: axis[generator.integers(len(axis))] for name, axis in axes.items()})
            if len(drawn) < self._coarse and self.space.is_feasible(point):
                values = {name: point[name] for name in axes if name in point}
                drawn.setdefault(repr(values), values)
        return list(drawn.values())

    def _best_ranges(self, trials: Sequence[Trial]) -> dict[str, list[float]]:
        """Returns the ends of each number's refined range."""
        coarse = [trial for trial in trials if trial.notes.get(_STAGE) == "coarse"]
        losses = self.comparable_losses(coarse)
        ranked = sorted((trial for trial in coarse if trial.number in losses), key=lambda trial: losses[trial.number])
        best = ranked[: math.ceil(_SHARE * len(coarse))]
        margin = 0.5 / (_POINTS - 1)
        ranges = {}
        for name, parameter in self.space.parameters.items():
            shares = [parameter.to_unit(trial.drawn[name]) for trial in best if name in trial.drawn]
            if shares and not isinstance(parameter, Choice):
                ends = max(0.0, min(shares) - margin), min(1.0, max(shares) + margin)
                ranges[name] = [parameter.from_unit(end) for end in ends]
        return ranges

    def _refined_space(self, ranges: Mapping[str, Sequence[float]]) -> Space:
        space = self.space
        try:
            for name, (low, high) in ranges.items():
                parameter = space.parameters[name]
                if low == high:
                    continue
                if isinstance(parameter, Int):
                    space = space.replace(name, replace(parameter, low=round(low), high=round(high)))
                elif isinstance(parameter, Float):
                    space = space.replace(name, replace(parameter, low=low, high=high))
        except UserError:  # a condition or the constraints never hold there
            return self.space
        return space
