"""The samplers by name."""

from collections.abc import Callable
from typing import Annotated, Any

from pydantic import Field

from posttrain.store.extensions import Registry
from posttrain.tune.parts import check_part, make_part
from posttrain.tune.samplers.base import Directions, Sampler
from posttrain.tune.space import Space

SAMPLERS: Registry[Callable[..., Sampler]] = Registry(
    "sampler",
    "posttrain.samplers",
    {
        "random": "posttrain.tune.samplers.unit_cube:RandomSampler",
        "quasi_random": "posttrain.tune.samplers.unit_cube:QuasiRandomSampler",
        "grid": "posttrain.tune.samplers.unit_cube:GridSampler",
        "tpe": "posttrain.tune.samplers.registry:tpe",
        "gp": "posttrain.tune.samplers.gaussian:gaussian_process",
        "nsga2": "posttrain.tune.samplers.genetic:nsga2",
        "staged": "posttrain.tune.samplers.staged:StagedSampler",
        "perturb": "posttrain.tune.samplers.population:PerturbSampler",
    },
)
"""A function of the space, the seed and ``maximize``, and of the sampler's options, by name."""


def make_sampler(value: Any, space: Space, seed: int = 0, maximize: Directions = False) -> Sampler:
    """Makes a sampler.

    Args:
        value: a name, a mapping of ``name`` and options, or a sampler as it is.
        space, seed, maximize: as `Sampler` takes them.

    Raises:
        UserError: there is no such sampler, or it has no such option.
    """
    return value if isinstance(value, Sampler) else make_part(SAMPLERS, value, "sampler", space, seed, maximize)


def check_sampler(value: Any, where: str) -> None:
    """Raises a `UserError` as `make_sampler` does, without making the sampler.

    Args:
        value: a name, or a mapping of ``name`` and options.
        where: the key, named in errors.
    """
    check_part(SAMPLERS, value, where, len(("space", "seed", "maximize")))


def tpe(space: Space, seed: int, maximize: Directions, startup: Annotated[int, Field(ge=0)] = 10) -> Sampler:
    """Returns the tree-structured Parzen estimator (Bergstra et al. 2011), multivariate, with groups of conditional
    parameters; trials that run count as bad ones (the constant liar), so that workers do not try the same point.

    Args:
        startup: trials that are drawn at random first.
    """
    from optuna.samplers import TPESampler

    from posttrain.tune.samplers.optuna_sampler import OptunaSampler

    return OptunaSampler(
        space,
        seed,
        maximize,
        lambda seed: TPESampler(seed=seed, n_startup_trials=startup, multivariate=True, group=True, constant_liar=True),
    )
