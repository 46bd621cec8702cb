"""Searches the settings of trainings: each trial trains a model, which is measured on held-out records."""

import json
import logging
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pyarrow as pa

from posttrain.jobs.runner import Runner
from posttrain.models.sources import fetch_once, locate
from posttrain.store.errors import UserError
from posttrain.store.hashing import digest
from posttrain.train.config import OPERATIONAL_SECTIONS
from posttrain.train.data.tokenise import content_digest
from posttrain.train.standalone import TrainJobConfig
from posttrain.tune.api import optimize
from posttrain.tune.budget import Budget
from posttrain.tune.goal import Goal
from posttrain.tune.result import TuneResult
from posttrain.tune.runs import open_trials
from posttrain.tune.schedulers.registry import make_scheduler
from posttrain.tune.space import Space
from posttrain.tune.trainings.checks import check_study
from posttrain.tune.trainings.config import TuneConfig
from posttrain.tune.trainings.features import data_features, model_features
from posttrain.tune.trainings.held_out import split_records
from posttrain.tune.trainings.model_checks import check_answers, check_rank_patterns, check_shapes
from posttrain.tune.trainings.one_shot import OneShotTrial, one_shot_config
from posttrain.tune.trainings.settings import apply_settings, configured_values, find_point, warmup_share
from posttrain.tune.trainings.training_trial import TrainingTrial
from posttrain.tune.transfer.past import PastStudy, read_past
from posttrain.tune.transfer.warm_start import Transfer

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
    if engine is None:  # workers of the config belong to its engine
        engine, workers = tune.engine, workers or tune.workers
    space = check_study(tune, config, engine, workers)
    supernet = one_shot_config(config, tune, space) if tune.one_shot else None
    if supernet is not None and limit.trials is None and limit.seconds is None:
        raise UserError("trials of one_shot process no tokens", where="tune.budget", fix="give such as 50 trials")
    base = config.model_dump(mode="json")
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
        "limits": tune.limits,
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
    check_answers(trial)
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
    def features() -> dict[str, float]:
        return data_features(trial.records) | model_features(fetch_once(trial.model, base))

    return optimize(
        open_runner,
        Goal(space, tune.searched, _identity(trial, parts)),
        budget=budget,
        sampler=tune.sampler or ("nsga2" if tune.one_shot else None),
        scheduler=scheduler,
        initial=initial,
        current=current,
        seed=trial.base["seed"],
        out=out,
        storage=tune.storage,
        to_config=lambda best: apply_settings(trial.base, best.settings),
        transfer=Transfer(past, features, configured_values(trial.base, space.parameters)),
    )


def training_parts(tune: TuneConfig) -> int:
    """Returns the number of parts that the scheduler cuts a training into.

    Raises:
        UserError: there is no such scheduler, or it has no such option, or lacks one.
    """
    return make_scheduler(tune.scheduler).max_resource or 1


def _current_point(trial: TrainingTrial | OneShotTrial, space: Space) -> dict[str, Any] | None:
    """Returns the point of the config's own settings; None where they are not a point of the space."""
    return find_point(space, trial.base, configured_values(trial.base, space.to_json()["entries"]), {})


def _identity(trial: TrainingTrial | OneShotTrial, parts: int) -> dict[str, str]:
    """Returns what decides the values of trials beside their settings, by name."""
    base = trial.base
    train = {key: value for key, value in base["train"].items() if key not in OPERATIONAL_SECTIONS}
    rest = {"train": train, "task": base["task"], "seed": base["seed"]}
    if isinstance(trial, OneShotTrial):
        rest["supernet"] = trial.supernet["train"]["lora"]
    return {
        "the training data": content_digest(trial.records),
        "the held-out data": content_digest(trial.held_out),
        "the model": base["model"],
        "the rest of the config": digest(rest),
        # A step is such a part of a training: with others, values of the same step cannot be compared.
        **({"the scheduler's max_resource": str(parts)} if parts > 1 else {}),
        **({"the limits": json.dumps(dict(trial.limits))} if trial.limits else {}),
    }
