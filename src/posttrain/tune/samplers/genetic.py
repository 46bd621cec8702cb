"""A genetic algorithm, as Optuna has it: generations of trials, whose parents are the best of those before."""

from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from posttrain.tune.samplers.base import Directions, Sampler
from posttrain.tune.space import Space

if TYPE_CHECKING:
    from optuna.samplers import BaseSampler


def nsga2(space: Space, seed: int, maximize: Directions, population: Annotated[int, Field(ge=2)] = 20) -> Sampler:
    """Returns NSGA-II (Deb et al. 2002), for one objective or several.

    Parents win binary tournaments, by their front and within a front by crowding distance; with one objective by its
    value. Numbers are crossed by simulated binary crossover (SBX; Deb and Agrawal 1995), choices by taking that of one
    or the other parent. Each setting of a child is drawn again with a probability of 1 / number of settings.

    Args:
        population: trials of a generation.
    """
    from optuna.samplers import NSGAIISampler
    from optuna.samplers.nsgaii import SBXCrossover

    from posttrain.tune.samplers.optuna_sampler import OptunaSampler

    def new(seed: int) -> "BaseSampler":
        return NSGAIISampler(seed=seed, population_size=population, crossover=SBXCrossover())

    return OptunaSampler(space, seed, maximize, new)
