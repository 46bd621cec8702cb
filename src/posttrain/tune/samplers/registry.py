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


AUTO = "auto"
"""Name of the sampler that `choose_sampler` chooses."""

_MOST_TRIALS, _MOST_PARAMETERS = 300, 20  # of a Gaussian process, whose proposals then take seconds


def choose_sampler(space: Space, objectives: int, trials: int | None, starts_warm: bool) -> str:
    """Chooses a sampler by the figures of ``benchmarks/results/tuning.md``.

    A Gaussian process needs fewer trials than TPE on all six functions and on recorded curves, but was measured for one
    objective, few parameters and some hundred trials; a study that starts from earlier ones was with TPE.

    Args:
        space: What is searched.
        objectives: Number of objectives.
        trials: Trials of the budget; None: it does not count them.
        starts_warm: Whether the study has earlier ones to start from.
    """
    few = len(space.parameters) <= _MOST_PARAMETERS and (trials is None or trials <= _MOST_TRIALS)
    return "gp" if few and objectives == 1 and not starts_warm else "tpe"


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
    if value == AUTO:
        return
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
