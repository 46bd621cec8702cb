"""Checks of a search of trainings before any work, on the command line and in a loop."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from posttrain.jobs.runner import check_engine
from posttrain.store.config import expand_variables
from posttrain.store.database import hide_password
from posttrain.store.errors import UserError
from posttrain.train.config import TrainConfig, can_change_on_resume
from posttrain.train.objectives.registry import objective_spec
from posttrain.train.standalone import TrainJobConfig
from posttrain.tune.runs import check_memory, check_objectives
from posttrain.tune.samplers.initial import read_points
from posttrain.tune.samplers.registry import check_sampler
from posttrain.tune.schedulers.registry import check_scheduler, make_scheduler
from posttrain.tune.space import Space
from posttrain.tune.spaces import values_of
from posttrain.tune.trainings.config import TRAINING_COSTS, TuneConfig
from posttrain.tune.trainings.settings import CHECKED_POINTS, OBJECTIVE_KEY, SETTING_PREFIX, apply_settings


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
    if tune.storage is not None:
        hide_password(expand_variables(tune.storage, "tune.storage"), "tune.storage")
    _check_measurable(tune, train)
    tune.suite(has_labels)
    _check_model_costs(tune, train)
    return space


def _check_model_costs(tune: TuneConfig, train: TrainConfig) -> None:
    """Raises a UserError if the size of an adapter is asked for, and a trial may train none."""
    methods = values_of(tune.space, "train.method", train.method, "tune.space")
    if "adapter_parameters" in (*tune.metrics, *tune.limits) and set(methods) != {"lora"}:
        where = "tune.limits" if "adapter_parameters" in tune.limits else "tune.objectives"
        what = "`adapter_parameters` are those of LoRA, and trials may train all weights"
        raise UserError(what, where=where, fix="set train.method to lora, or use parameters")


def _check_measurable(tune: TuneConfig, train: TrainConfig) -> None:
    """Raises a UserError if trials make reward models or classifiers, which no scorer measures.

    Scorers ask a model for answers, or for their likelihoods.
    """
    for name in values_of(tune.space, OBJECTIVE_KEY, train.objective.name, "tune.space"):
        if objective_spec(name).classifier:
            where = f"tune.space.{OBJECTIVE_KEY}" if OBJECTIVE_KEY in tune.space else OBJECTIVE_KEY
            what = f"`{name}` makes a model that judges and does not answer, so no trial can be measured"
            raise UserError(what, where=where, fix="use posttrain train")


def check_settings(space: Space, base: Mapping[str, Any]) -> None:
    """Checks points of a space as settings of a training.

    Args:
        space: what is searched.
        base: a `TrainJobConfig` as JSON values, which settings are laid over.

    Raises:
        UserError: the space has no key of the training, or settings that do not fit.
    """
    used = space.used_names
    for name in space.parameters:
        if not name.startswith(SETTING_PREFIX) and name not in used:
            what = f"`{name}` is not a setting of a training, and no formula has it"
            raise UserError(what, where="tune.space", fix=f"write {SETTING_PREFIX}{name}")
    if not any(name.startswith(SETTING_PREFIX) for name in space.to_json()["entries"]):
        what = f"{', '.join(space.parameters)} change no setting of a training"
        raise UserError(what, where="tune.space", fix=f"derive one from them, such as {SETTING_PREFIX}learning_rate")
    generator = np.random.default_rng(0)
    for _ in range(CHECKED_POINTS):
        point = space.complete(space.draw(generator))
        try:
            TrainJobConfig.read(apply_settings(base, point), "tune.space")
        except UserError as error:
            named = {name: value for name, value in point.items() if error.key and error.key.startswith(name)}
            shown = "".join(f", as with {name} = {value}" for name, value in named.items())
            raise UserError(f"{error.what}{shown}", where="tune.space", fix=error.fix) from None


def check_study(tune: TuneConfig, config: TrainJobConfig, engine: str, workers: int | None) -> Space:
    """Checks a search with an engine of `posttrain tune`, and returns its space.

    Raises:
        UserError: as `check_search`; the engine does not measure what is limited or searched; a population's trainings
            cannot change what is searched.
    """
    base = config.model_dump(mode="json")
    space = check_search(tune, base, config.train, has_labels=bool(config.task.label_set))
    check_engine(engine, workers)
    _check_memory(tune, engine)
    if make_scheduler(tune.scheduler).has_forks:
        _check_forks(space, config)
    check_objectives(tune.searched, engine, starts_warm=tune.warm_start is not None, section="tune.")
    return space


def _check_forks(space: Space, config: TrainJobConfig) -> None:
    """Raises a UserError if a trial cannot continue from a checkpoint of another with its own settings."""
    for name in space.varying:
        if name.startswith(SETTING_PREFIX) and not can_change_on_resume(name.removeprefix(SETTING_PREFIX)):
            raise UserError(
                f"`{name}` cannot change while a training runs, as it does in a population",
                where="tune.scheduler",
                fix="search learning rate, schedule, weight decay, dropout or settings of the objective, or use asha",
            )
    if not config.train.checkpoint.enabled:
        what = "there are none, and a population continues from them"
        raise UserError(what, where="train.checkpoint", fix="set train.checkpoint.every_seconds")


def _check_memory(tune: TuneConfig, engine: str) -> None:
    """Raises a UserError if a limit of memory is set that cannot be measured, or that no trial is trained under."""
    names = [name for name in TRAINING_COSTS if name in tune.limits]
    check_memory(names, engine, "tune.limits")
    if names and tune.one_shot:
        what = f"`{names[0]}` is that of a training, and trials of one_shot train nothing"
        raise UserError(what, where="tune.limits", fix="leave it out")
