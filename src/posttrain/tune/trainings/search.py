"""Searches the settings of trainings: each trial trains a model, which is measured on held-out records."""

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pyarrow as pa

from posttrain.evaluate.scorers.base import read_examples
from posttrain.evaluate.scorers.likelihood import label_indices, preference_pairs
from posttrain.jobs.runner import Runner, check_engine
from posttrain.models.sources import fetch_once, locate
from posttrain.store.errors import UserError
from posttrain.store.hashing import digest
from posttrain.train.config import OPERATIONAL_SECTIONS, can_change_on_resume
from posttrain.train.data.tokenise import content_digest
from posttrain.train.standalone import TrainJobConfig
from posttrain.tune.api import check_objectives, optimize
from posttrain.tune.budget import Budget
from posttrain.tune.result import TuneResult
from posttrain.tune.runs import check_memory, open_trials
from posttrain.tune.schedulers.registry import make_scheduler
from posttrain.tune.space import Space
from posttrain.tune.trainings.checks import check_search
from posttrain.tune.trainings.config import TRAINING_COSTS, TuneConfig
from posttrain.tune.trainings.features import data_task, early_losses, model_features
from posttrain.tune.trainings.held_out import split_records
from posttrain.tune.trainings.model_shapes import check_shapes
from posttrain.tune.trainings.one_shot import OneShotTrial, one_shot_config
from posttrain.tune.trainings.ranks import check_rank_patterns
from posttrain.tune.trainings.settings import SETTING_PREFIX, apply_settings, configured_values, find_point
from posttrain.tune.trainings.training_trial import TrainingTrial
from posttrain.tune.trainings.warmup import warmup_share
from posttrain.tune.transfer.past import PastStudy, Task, read_past
from posttrain.tune.trial import Trial

log = logging.getLogger("posttrain")

_BASE = Path("trials") / "base"  # the initial model, where it had to be fetched


def tune_trainings(
    config: TrainJobConfig,
    tune: TuneConfig,
    records: pa.Table,
    out: Path,
    *,
    root: Path,
    budget: str | None = None,
    engine: str | None = None,
    workers: int | None = None,
) -> TuneResult:
    """Searches the settings of a training.

    Args:
        config: the training, with absolute paths; the space changes keys of its ``train``.
        tune: what is searched.
        records: RECORD rows to train on; those that are held out are left out.
        out: folder of the study; ``best.yaml`` is ready for ``posttrain train --config``.
        root: folder that the held-out file is relative to.
        budget: in place of ``tune.budget``.
        engine: ``inline``, ``processes``, ``ray`` or ``slurm``, in place of ``tune.engine``.
        workers: trainings at a time, in place of ``tune.workers``.

    Raises:
        UserError: a setting, the space, the metric or a record cannot be used; the study was begun with other data.
        WorkError: the first trainings have all failed.
    """
    if budget is None and tune.budget is None:
        raise UserError("says nothing of what it may spend", where="tune.budget", fix="give --budget 50 trials")
    limit = tune.read_budget(budget)
    base = config.model_dump(mode="json")
    space = check_search(tune, base, config.train, has_labels=bool(config.task.label_set))
    if engine is None:  # workers of the config belong to its engine
        engine, workers = tune.engine, workers or tune.workers
    check_engine(engine, workers)
    _check_memory(tune, engine)
    supernet = None if tune.one_shot is None else one_shot_config(config, tune, space)
    if supernet is not None and limit.trials is None and limit.seconds is None:
        raise UserError("trials of one_shot process no tokens", where="tune.budget", fix="give such as 50 trials")
    if make_scheduler(tune.scheduler).has_forks:
        _check_forks(space, config)
    if tune.several is not None:
        check_objectives(tune.several, engine, starts_warm=tune.warm_start is not None, section="tune.")
    source = locate(config.model, Path(), weights=not config.train.from_scratch)
    check_shapes(space, base, source)
    training, held_out = split_records(records, tune, config, root)
    shared: dict[str, Any] = {
        "base": base,
        "model": source,
        "records": training,
        "held_out": held_out,
        "suite": tune.suite(bool(config.task.label_set)),
        "metrics": tune.metrics,
        "limits": tune.limits.values,
    }
    trial: TrainingTrial | OneShotTrial = TrainingTrial(**shared, parts=training_parts(tune))
    if supernet is not None:
        trial = OneShotTrial(**shared, supernet=supernet, folder=out.resolve())
    past = [] if tune.warm_start is None else read_past(tune.warm_start, root, "tune.warm_start", exclude=out)
    result = search_trainings(
        trial,
        tune,
        out,
        budget=limit,
        engine=engine,
        workers=workers,
        initial=tune.initial,
        current=_current_point(trial, space),
        past=past,
    )
    if isinstance(trial, OneShotTrial) and result.best is not None:
        trial.with_model(fetch_once(trial.model, out / _BASE)).export(result.best.settings)
    return result


def search_trainings(
    trial: TrainingTrial | OneShotTrial,
    tune: TuneConfig,
    out: Path,
    *,
    budget: Budget,
    engine: str = "inline",
    workers: int | None = None,
    initial: Sequence[Mapping[str, Any]] = (),
    current: Mapping[str, Any] | None = None,
    past: Sequence[PastStudy] = (),
) -> TuneResult:
    """Searches the settings of a training whose records have been split.

    Args:
        trial: what a trial does.
        tune: what is searched.
        out: folder of the study.
        budget: of the study.
        engine, workers: as in `tune_trainings`.
        initial: points that are tried first.
        current: the point of the settings in force, which a new study tries before them.
        past: earlier studies that this one may start from.

    Raises:
        UserError: a setting or a point cannot be used; the study was begun with other data.
        WorkError: the first trainings have all failed.
    """
    space, parts = Space(tune.space, tune.constraints, "tune.space"), training_parts(tune)
    check_rank_patterns(space, trial.base, trial.model)
    _check_answers(trial)
    scheduler = make_scheduler(tune.scheduler)
    # Known of trainings: else one whose last report spends the budget would pause in place of being finished.
    scheduler.max_resource = parts
    if warning := scheduler.spare_warmup(warmup_share(space, trial.base, trial.records.num_rows)):
        log.warning("  %s", warning)
    base = out / _BASE

    def open_runner() -> Runner:
        # Now, as everything has been checked. The model is fetched once for all trials.
        return open_trials(engine, trial.with_model(fetch_once(trial.model, base)), workers, tune.silence)

    @cache
    def data_of_task() -> Task:
        # Not before everything has been checked: a sentence model may run over the records.
        return data_task(trial.records)

    def task(trials: Sequence[Trial]) -> Task:
        data, model = data_of_task(), model_features(fetch_once(trial.model, base))
        return replace(data, features={**data.features, **model, **early_losses(out / "trials")})

    return optimize(
        open_runner,
        space,
        budget=budget,
        sampler=tune.sampler or (None if tune.one_shot is None else "nsga2"),
        scheduler=scheduler,
        initial=initial,
        current=current,
        seed=trial.base["seed"],
        out=out,
        storage=tune.storage,
        objective=f"held-out {tune.metric}",
        maximize=tune.is_maximized,
        several=tune.several,
        identity={
            "the training data": content_digest(trial.records),
            "the held-out data": content_digest(trial.held_out),
            "the model": trial.base["model"],
            "the rest of the config": digest(_without_operations(trial)),
            # A step is such a part of a training: with others, values of the same step cannot be compared.
            **({"the scheduler's max_resource": str(parts)} if parts > 1 else {}),
            **({"the limits": json.dumps(dict(trial.limits))} if trial.limits else {}),
        },
        to_config=lambda best: apply_settings(trial.base, best.settings),
        past=past,
        task=task,
        defaults=configured_values(trial.base, space.parameters),
    )


def training_parts(tune: TuneConfig) -> int:
    """Returns the number of parts that the scheduler cuts a training into.

    Raises:
        UserError: there is no such scheduler, or it has no such option, or lacks one.
    """
    return make_scheduler(tune.scheduler).max_resource or 1


def _check_memory(tune: TuneConfig, engine: str) -> None:
    """Raises a UserError if a limit of memory is set that cannot be measured, or that no trial is trained under."""
    names = [name for name in TRAINING_COSTS if name in tune.limits.values]
    check_memory(names, engine, "tune.limits")
    if names and tune.one_shot is not None:
        what = f"`{names[0]}` is that of a training, and trials of one_shot train nothing"
        raise UserError(what, where="tune.limits", fix="leave it out")


def _check_answers(trial: TrainingTrial | OneShotTrial) -> None:
    """Raises a UserError if held-out records lack what the scorer needs, as it would after the first training."""
    examples = read_examples(trial.held_out, "tune.held_out")
    if trial.suite.scorer == "label_likelihood":
        label_indices(examples, trial.base["task"]["labels"] or [], "tune.held_out")
    elif trial.suite.scorer == "preference":
        examples.check_prompts("tune.held_out")
        preference_pairs(examples, "tune.held_out")


def _current_point(trial: TrainingTrial | OneShotTrial, space: Space) -> dict[str, Any] | None:
    """Returns the point of the config's own settings; None where they are none of the space."""
    return find_point(space, trial.base, configured_values(trial.base, space.to_json()["entries"]), {})


def _without_operations(trial: TrainingTrial | OneShotTrial) -> dict[str, Any]:
    """Returns what decides the result of a training, but for data and model."""
    base = trial.base
    train = {key: value for key, value in base["train"].items() if key not in OPERATIONAL_SECTIONS}
    values = {"train": train, "task": base["task"], "seed": base["seed"]}
    return values | ({"supernet": trial.supernet["train"]["lora"]} if isinstance(trial, OneShotTrial) else {})


def _check_forks(space: Space, config: TrainJobConfig) -> None:
    """Raises a UserError if a trial cannot go on from a checkpoint of another with its own settings."""
    for name in space.varying:
        if name.startswith(SETTING_PREFIX) and not can_change_on_resume(name.removeprefix(SETTING_PREFIX)):
            raise UserError(
                f"`{name}` cannot change while a training runs, as it does in a population",
                where="tune.scheduler",
                fix="search learning rate, schedule, weight decay, dropout or settings of the objective, or use asha",
            )
    if not config.train.checkpoint.enabled:
        what = "there are none, and a population goes on from them"
        raise UserError(what, where="train.checkpoint", fix="set train.checkpoint.every_seconds")
