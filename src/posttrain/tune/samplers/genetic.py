"""Genetic algorithms, as Optuna has them: generations of trials, whose parents are the best of those before."""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from posttrain.store.errors import UserError, suggest
from posttrain.tune.parts import check_ranges
from posttrain.tune.samplers.base import Directions, Sampler
from posttrain.tune.space import Space

if TYPE_CHECKING:
    from optuna.samplers import BaseSampler

_CROSSOVERS = {
    "uniform": "UniformCrossover",
    "one_point": "OnePointCrossover",
    "sbx": "SBXCrossover",
    "vsbx": "VSBXCrossover",
    "blx_alpha": "BLXAlphaCrossover",
    "spx": "SPXCrossover",
    "undx": "UNDXCrossover",
}

_MUTATIONS = {"uniform": None, "polynomial": "PolynomialMutation", "gaussian": "GaussianMutation"}


def nsga2(
    space: Space,
    seed: int,
    maximize: Directions,
    population: int = 20,
    crossover: str = "sbx",
    crossover_chance: float = 0.9,
    mutation: str = "uniform",
    mutation_chance: float | None = None,
) -> Sampler:
    """Returns NSGA-II (Deb et al. 2002): parents by their front, and within a front by crowding distance.

    Args:
        population: trials of a generation.
        crossover: ``sbx`` (simulated binary; Deb and Agrawal 1995), ``vsbx``, ``blx_alpha``, ``spx``, ``undx``,
            ``one_point``, which takes the first settings from one parent and the rest from the other, or ``uniform``,
            which takes each setting of one or the other. Choices are always crossed so.
        crossover_chance: share of children of several parents.
        mutation: ``uniform`` draws a setting anew, ``polynomial`` (Deb and Agrawal 1999) and ``gaussian`` near its
            value; choices are always drawn anew.
        mutation_chance: of each setting; None: 1 / number of settings.

    Raises:
        UserError: there is no such crossover or mutation, or an option is out of its range.
    """
    return _genetic(
        "NSGAIISampler", space, seed, maximize, population, crossover, crossover_chance, mutation, mutation_chance
    )


def nsga3(
    space: Space,
    seed: int,
    maximize: Directions,
    population: int = 20,
    crossover: str = "sbx",
    crossover_chance: float = 0.9,
    mutation: str = "uniform",
    mutation_chance: float | None = None,
    divisions: int = 3,
) -> Sampler:
    """Returns NSGA-III (Deb and Jain 2014), for three objectives or more: parents are spread over reference directions.

    Args:
        divisions: parts that the reference directions divide each objective into.

    The other arguments and the errors are those of `nsga2`.
    """
    check_ranges("sampler", {"divisions": (divisions, divisions >= 1, "at least 1")})
    return _genetic(
        "NSGAIIISampler",
        space,
        seed,
        maximize,
        population,
        crossover,
        crossover_chance,
        mutation,
        mutation_chance,
        dividing_parameter=int(divisions),
    )


evolutionary = partial(nsga2, mutation="gaussian")
"""A genetic algorithm with tournaments and elitism: `nsga2`, whose children stay near their parents."""


def _genetic(
    name: str,
    space: Space,
    seed: int,
    maximize: Directions,
    population: int,
    crossover: str,
    crossover_chance: float,
    mutation: str,
    mutation_chance: float | None,
    **options: Any,
) -> Sampler:
    import optuna.samplers
    from optuna.samplers import nsgaii

    from posttrain.tune.samplers import genetic_operators
    from posttrain.tune.samplers.optuna_sampler import OptunaSampler

    def operator(name: str) -> Any:
        return getattr(genetic_operators, name, None) or getattr(nsgaii, name)

    for key, value, known in (("crossover", crossover, _CROSSOVERS), ("mutation", mutation, _MUTATIONS)):
        if value not in known:
            raise UserError(f"there is no {key} `{value}`", where=f"sampler.{key}", fix=suggest(value, known))
    # The class has the number; an object of it would warn that it is experimental.
    least: int = operator(_CROSSOVERS[crossover]).n_parents
    check_ranges(
        "sampler",
        {
            "population": (population, population >= max(2, least), f"at least {max(2, least)}"),
            "crossover_chance": (crossover_chance, 0 <= crossover_chance <= 1, "0 to 1"),
            "mutation_chance": (mutation_chance or 0.0, 0 <= (mutation_chance or 0.0) <= 1, "0 to 1"),
        },
    )
    make: Callable[..., BaseSampler] = getattr(optuna.samplers, name)
    mutate = _MUTATIONS[mutation]

    def new(seed: int) -> "BaseSampler":
        return make(
            seed=seed,
            population_size=int(population),
            crossover=operator(_CROSSOVERS[crossover])(),
            crossover_prob=crossover_chance,
            mutation=None if mutate is None else operator(mutate)(),
            mutation_prob=mutation_chance,
            **options,
        )

    return OptunaSampler(space, seed, maximize, new)
