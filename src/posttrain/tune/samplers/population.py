"""Samplers for populations: they also propose settings for trials that continue from another trial's checkpoint."""

import math
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np

from posttrain.tune.parameters import Choice, Float, Int, Parameter, is_number
from posttrain.tune.samplers.base import Proposal, Sampler
from posttrain.tune.space import Settings, Space
from posttrain.tune.trial import Fork, Trial

_FACTORS = (0.8, 1.2)

_RESAMPLE = 0.25  # probability with which a setting is drawn again, each on its own

_LEAST_STEP = 0.02  # of a linear range with 0 or less in it, as a share: a factor would not leave 0

_MAX_DRAWS = 100  # of one child, until its settings meet the constraints


class PopulationSampler(Sampler):
    """A sampler for schedulers whose trials continue from checkpoints of others (`Scheduler.has_forks`).

    The first members of a population are drawn at random. To write one, define `propose_child`, for which all that
    `Sampler` says of `propose` holds. With several workers it may be called while other trials of the generation run
    already, so that reports after the step of the fork must not count.
    """

    def propose(self, number: int, trials: Sequence[Trial]) -> Proposal | None:
        return Proposal(self.space.draw(self.generator(number)))

    @abstractmethod
    def propose_child(self, number: int, trials: Sequence[Trial], fork: Fork) -> Proposal:
        """Returns the settings of a trial that continues from a checkpoint.

        Args:
            number: its number.
            trials: the trials before it, by number.
            fork: the checkpoint.
        """


class PerturbSampler(PopulationSampler):
    """Perturbs the parent's settings, or draws them again (Jaderberg et al. 2017, arXiv:1711.09846, section 3)."""

    def propose_child(self, number: int, trials: Sequence[Trial], fork: Fork) -> Proposal:
        drawn = trials[fork.parent].drawn
        return Proposal(perturb(self.space, drawn, self.generator(number)))


def perturb(
    space: Space, drawn: Settings, generator: np.random.Generator, resample: float = _RESAMPLE
) -> dict[str, Any]:
    """Perturbs settings: numbers by a factor of 0.8 or 1.2, within their ranges.

    Integers change by at least 1. Choices of numbers become the next smaller or greater one; others change only where
    they are drawn again. A parameter that comes into being is drawn. Where 100 tries do not meet the constraints, the
    settings stay as they are.

    Args:
        space: their space.
        drawn: a value for each parameter that exists.
        generator: source of random numbers.
        resample: probability with which a value is drawn again.
    """
    for _ in range(_MAX_DRAWS):
        child: dict[str, Any] = {}
        for name, parameter in space.parameters.items():
            if not space.exists(name, child):
                continue
            if name not in drawn or generator.random() < resample:
                child[name] = parameter.from_unit(generator.random())
            else:
                child[name] = _perturb_value(parameter, drawn[name], _FACTORS[generator.integers(2)])
        if space.is_feasible(space.complete(child)):
            return child
    return dict(drawn)


def _perturb_value(parameter: Parameter, value: Any, factor: float) -> Any:
    """Returns a value that is smaller or greater, as the factor is."""
    if isinstance(parameter, Choice):
        if not all(map(is_number, parameter.values)):
            return value
        ranked = sorted(parameter.values)
        index = ranked.index(value) + (1 if factor > 1 else -1)
        return ranked[min(max(index, 0), len(ranked) - 1)]
    assert isinstance(parameter, Float | Int)
    changed = value * factor
    if parameter.low <= 0:
        least = _LEAST_STEP * (parameter.high - parameter.low)
        changed = value + math.copysign(max(abs(value * (factor - 1)), least), factor - 1)
    if isinstance(parameter, Int):
        changed = round(changed)
        if changed == value:
            changed += 1 if factor > 1 else -1
    return min(max(changed, parameter.low), parameter.high)
