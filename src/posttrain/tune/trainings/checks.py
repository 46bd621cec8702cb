"""Checks of a search of trainings before any work, on the command line and in a loop."""

from collections.abc import Mapping
from typing import Any

from posttrain.jobs.runner import check_engine
from posttrain.store.errors import UserError
from posttrain.train.config import TrainConfig
from posttrain.train.objectives.registry import objective_spec
from posttrain.tune.samplers.initial import read_points
from posttrain.tune.samplers.registry import check_sampler
from posttrain.tune.schedulers.registry import check_scheduler
from posttrain.tune.space import Space
from posttrain.tune.spaces import values_of
from posttrain.tune.storage import describe_location
from posttrain.tune.trainings.config import OBJECTIVE_KEY, TuneConfig
from posttrain.tune.trainings.settings import check_settings


def check_search(tune: TuneConfig, base: Mapping[str, Any], train: TrainConfig, *, has_labels: bool) -> Space:
    """Checks a search, and returns its space.

    Args:
        tune: The section.
        base: The training's config as JSON values, which settings are laid over.
        train: Its section ``train``.
        has_labels: True for a task with a label set.

    Raises:
        UserError: Engine, space, settings, points, sampler, scheduler or metric cannot be used.
    """
    check_engine(tune.engine, tune.workers, "tune.")
    space = Space(tune.space, tune.constraints, "tune.space")
    check_settings(space, base)
    read_points(tune.initial, space, "tune.initial")
    if tune.sampler is not None:
        check_sampler(tune.sampler, "tune.sampler")
    check_scheduler(tune.scheduler, "tune.scheduler")
    describe_location(None, tune.storage, "tune.storage")
    _check_measurable(tune, train)
    tune.suite(has_labels)
    _check_model_costs(tune, train)
    return space


def _check_model_costs(tune: TuneConfig, train: TrainConfig) -> None:
    """Raises a UserError if the size of an adapter is asked for, and a trial may train none."""
    methods = values_of(tune.space, "train.method", train.method, "tune.space")
    if "adapter_parameters" in (*tune.metrics, *tune.limits.values) and set(methods) != {"lora"}:
        where = "tune.limits" if "adapter_parameters" in tune.limits.values else "tune.objectives"
        what = "`adapter_parameters` are those of LoRA, and trials may train all weights"
        raise UserError(what, where=where, fix="set train.method to lora, or use parameters")


def _check_measurable(tune: TuneConfig, train: TrainConfig) -> None:
    """Raises a UserError if trials make reward models or classifiers, which no scorer measures.

    Scorers ask a model for answers, or for their likelihoods.
    """
    for name in values_of(tune.space, OBJECTIVE_KEY, train.objective, "tune.space"):
        if objective_spec(name).output in ("reward", "classes"):
            where = f"tune.space.{OBJECTIVE_KEY}" if OBJECTIVE_KEY in tune.space else OBJECTIVE_KEY
            what = f"`{name}` makes a model that judges and does not answer, so no trial can be measured"
            raise UserError(what, where=where, fix="use posttrain train")
