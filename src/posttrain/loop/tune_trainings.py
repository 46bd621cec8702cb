"""Searches the settings of trainings: each trial trains a model, which is measured on held-out records."""

import json
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from posttrain.evaluate.scorers.base import read_examples
from posttrain.evaluate.scorers.likelihood import label_indices
from posttrain.loop.held_out import split_records
from posttrain.loop.measured_trial import MeasuredTrial
from posttrain.loop.model_costs import check_limits
from posttrain.loop.model_shapes import check_shapes
from posttrain.loop.one_shot import OneShotTrial, one_shot_config
from posttrain.loop.tune_config import (
    SETTING_PREFIX,
    TuneConfig,
    apply_settings,
    check_model_costs,
    check_settings,
    setting_path,
)
from posttrain.loop.tune_features import EARLY_FOLDER, data_task, early_losses, model_features
from posttrain.loop.tune_ranks import check_rank_patterns
from posttrain.models.language_model import LanguageModel, load_language_model
from posttrain.models.precision import choose_precision
from posttrain.models.sources import fetch_once, locate
from posttrain.store.errors import UserError
from posttrain.store.files import make_folder, write_atomically
from posttrain.store.hashing import digest
from posttrain.train.callbacks import Callback, CallbackList, TrainingStopped
from posttrain.train.config import OPERATIONAL_SECTIONS, can_change_on_resume
from posttrain.train.data.tokenise import content_digest
from posttrain.train.monitor.metrics import StepValues
from posttrain.train.standalone import TrainJobConfig, train_standalone
from posttrain.tune.api import TuneResult, check_objectives, optimize
from posttrain.tune.backends.base import Backend
from posttrain.tune.backends.registry import check_engine
from posttrain.tune.backends.registry import open_backend as open_engine
from posttrain.tune.budget import Budget
from posttrain.tune.context import TrialContext, TrialInterrupted
from posttrain.tune.objectives import Measured
from posttrain.tune.parts import check_part
from posttrain.tune.samplers.initial import read_points
from posttrain.tune.samplers.registry import SAMPLERS
from posttrain.tune.schedulers.registry import SCHEDULERS, make_scheduler
from posttrain.tune.space import Space
from posttrain.tune.transfer.past import EARLY_STEP, PastStudy, Task, read_past
from posttrain.tune.trial import Trial

log = logging.getLogger("posttrain")

_MODEL, _EVALUATIONS = "model", "evaluations.json"

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
    migrate: bool = False,
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
        migrate: carry an earlier study's trials over to a space that has changed.

    Raises:
        UserError: a setting, the space, the metric or a record cannot be used; the study was begun with other data.
        WorkError: the first trainings have all failed.
    """
    if budget is None and tune.budget is None:
        raise UserError("says nothing of what it may spend", where="tune.budget", fix="give --budget 50 trials")
    limit = tune.limit(budget)
    check_engine(tune.engine, tune.workers, "tune.")
    if engine is None:  # workers of the config belong to its engine
        engine, workers = tune.engine, workers or tune.workers
    check_engine(engine, workers)
    space = Space(tune.space, tune.constraints, "tune.space")
    check_settings(space, config.model_dump(mode="json"))
    read_points(tune.initial, space, "tune.initial")
    if tune.sampler is not None:
        check_part(SAMPLERS, tune.sampler, "tune.sampler", 3)
    check_part(SCHEDULERS, tune.scheduler, "tune.scheduler", 0)
    supernet = None if tune.one_shot is None else one_shot_config(config, tune, space)
    if supernet is not None and not any((limit.trials, limit.seconds, limit.gpu_seconds, limit.money)):
        raise UserError("trials of one_shot process no tokens", where="tune.budget", fix="give such as 50 trials")
    if make_scheduler(tune.scheduler).has_forks:
        _check_forks(space, config)
    if tune.several is not None:
        check_objectives(
            tune.several,
            engine,
            stops_early=tune.stop is not None,
            starts_warm=tune.warm_start is not None,
            section="tune.",
        )
    suite = tune.suite(bool(config.task.label_set))
    check_model_costs(tune, config.train)
    source = locate(config.model, Path(), weights=config.train.initialization.method == "none")
    check_shapes(space, config.model_dump(mode="json"), source)
    training, held_out = split_records(records, tune, config, root)
    if suite.scorer == "label_likelihood":  # before any training, after which it would find the same
        label_indices(read_examples(held_out, "tune.held_out"), config.task.label_set or [], "tune.held_out")
    shared: dict[str, Any] = {
        "base": config.model_dump(mode="json"),
        "model": source,
        "records": training,
        "held_out": held_out,
        "suite": suite,
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
        migrate=migrate,
        initial=tune.initial,
        past=past,
    )
    if isinstance(trial, OneShotTrial) and result.best is not None:
        trial.with_model(fetch_once(trial.model, out / _BASE)).export(result.best.settings)
    return result


def search_trainings(
    trial: "TrainingTrial | OneShotTrial",
    tune: TuneConfig,
    out: Path,
    *,
    budget: Budget,
    engine: str = "inline",
    workers: int | None = None,
    migrate: bool = False,
    initial: Sequence[Mapping[str, Any]] = (),
    past: Sequence[PastStudy] = (),
) -> TuneResult:
    """Searches the settings of a training whose records have been split.

    Args:
        trial: what a trial does.
        tune: what is searched.
        out: folder of the study.
        budget: of the study.
        engine, workers, migrate: as in `tune_trainings`.
        initial: points that are tried first.
        past: earlier studies that this one may start from.

    Raises:
        UserError: a setting or a point cannot be used; the study was begun with other data.
        WorkError: the first trainings have all failed.
    """
    space, parts = Space(tune.space, tune.constraints, "tune.space"), training_parts(tune)
    check_rank_patterns(space, trial.base, trial.model)
    base = out / _BASE

    def open_backend() -> Backend:
        # Now, as everything has been checked. The model is fetched once for all trials.
        return open_engine(engine, trial.with_model(fetch_once(trial.model, base)), workers, tune.silence)

    @cache
    def data_of_task() -> Task:
        # Not before everything has been checked: a sentence model may run over the records.
        return data_task(trial.records)

    def task(trials: Sequence[Trial]) -> Task:
        data, model = data_of_task(), model_features(fetch_once(trial.model, base))
        return replace(data, features={**data.features, **model, **early_losses(out / "trials")})

    return optimize(
        open_backend,
        space,
        budget=budget,
        sampler=tune.sampler
        or (None if tune.one_shot is None or tune.several is not None else "regularized_evolution"),
        scheduler=tune.scheduler,
        initial=initial,
        seed=trial.base["seed"],
        out=out,
        storage=tune.storage,
        migrate=migrate,
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
        stop=None if tune.stop is None else {"gain": tune.stop.gain},
        past=past,
        task=task,
        defaults=_values(trial.base, space),
    )


@dataclass(frozen=True, kw_only=True)
class TrainingTrial(MeasuredTrial):
    """The function of the study: trains with a trial's settings, and measures what was trained.

    A training is cut into equal parts. After each the training stops behind its checkpoint, the model is measured, and
    the value is reported; then the training resumes, in this run or in a later one. So the result is that of one
    training that was never stopped. A trial of a population finds a copy of its parent's folder, and goes on from that
    checkpoint with its own settings.

    Args:
        parts: number of parts, which is the resource of a whole training.
        difficulties: float64 [records], a higher one is harder; None: as the config has it.
        weights: float64 [records], of the records in the loss; None: as the config has it.
    """

    parts: int
    difficulties: np.ndarray | None = None
    weights: np.ndarray | None = None

    def __call__(self, trial: TrialContext) -> Measured:
        """Runs a trial from where it is; returns the value of the trained model, of several metrics a list.

        Raises:
            Infeasible: the model is over a limit.
        """
        file = trial.folder / _EVALUATIONS
        values: list[Measured] = json.loads(file.read_bytes()) if file.exists() else []
        if values:  # its report may have been lost in a kill
            trial.report(len(values), values[-1])
        config = TrainJobConfig.read(apply_settings(self.base, trial.settings), f"trial {trial.number}")
        costs = self.shape_costs(config.train)  # before anything is trained
        while len(values) < self.parts:
            early = trial.folder.parent / EARLY_FOLDER / f"{trial.number:04d}.json"
            share = (len(values) + 1) / self.parts
            measure = _StopAndMeasure(share, self.parts, partial(self.measure, costs), early, trial.show_life)
            finished = self._train(trial.folder / _MODEL, config, measure)
            if measure.interruption is not None and not finished:
                raise measure.interruption
            if finished:
                lm = load_language_model(trial.folder / _MODEL, config.task, choose_precision())
                measure.value = self.measure(costs, lm)
            assert measure.value is not None, "the training was stopped, and its model measured"
            check_limits(costs, self.limits)  # with the latency
            values.append(measure.value)
            write_atomically(file, json.dumps(values).encode())
            trial.report(len(values), values[-1], tokens=measure.tokens)
            if finished:
                break
        return values[-1]

    def with_model(self, folder: Path) -> "TrainingTrial":
        """Returns the trial with the initial model in a folder."""
        return replace(self, model=str(folder))

    def _train(self, out: Path, config: TrainJobConfig, measure: "_StopAndMeasure") -> bool:
        """Trains until the callback stops it; returns whether the training is done."""
        level = log.level
        log.setLevel(logging.WARNING)  # what a training says is for whoever runs one
        try:
            # Data never change, and settings only from a parent's to those of a trial that goes on from it.
            train_standalone(
                out,
                config,
                self.records,
                Path(self.model),
                fork=True,
                callbacks=CallbackList(measure),
                difficulties=self.difficulties,
                weights=self.weights,
            )
        except TrainingStopped:
            return False
        finally:
            log.setLevel(level)
        return True


class _StopAndMeasure(Callback):
    """Stops a training after a share of its steps, and measures the model; keeps the training loss at step 10.

    Args:
        share: of the steps.
        parts: that the training is cut into.
        measure: returns the value of a model.
        early: file of the early loss.
        show_life: called after each step, as a report is due after a part alone.

    Attributes:
        tokens: that the steps have processed.
        value: of the model that was stopped, or several; None before.
        interruption: why the run is to end, between two parts; None: it is not to.
    """

    def __init__(
        self,
        share: float,
        parts: int,
        measure: Callable[[LanguageModel], Measured],
        early: Path,
        show_life: Callable[[], None],
    ) -> None:
        self._share, self._measure, self._early, self._goal = share, measure, early, 0
        self._parts, self._show_life = parts, show_life
        self.tokens = 0
        self.value: Measured | None = None
        self.interruption: TrialInterrupted | None = None

    def on_begin(self, steps: int, total: int) -> bool:
        if total < self._parts:
            what = f"a training has {total} steps, and {self._parts} parts"
            raise UserError(what, where="tune.scheduler.max_resource", fix=f"give at most {total}, or train longer")
        # Rounded first: 3 / 9 of 9 steps is not to be 4 of them.
        self._goal = math.ceil(round(self._share * total, 6))
        return steps >= self._goal

    def on_step(self, step: StepValues) -> bool:
        self.tokens += step.tokens
        if step.step + 1 == EARLY_STEP and math.isfinite(step.loss):
            make_folder(self._early.parent)
            write_atomically(self._early, json.dumps(step.loss).encode())
        try:
            self._show_life()
        except TrialInterrupted as interruption:
            self.interruption = interruption  # raised behind the checkpoint, so that no step is lost
        return self.interruption is not None or step.step + 1 >= self._goal

    def on_stop(self, model: LanguageModel) -> None:
        if self.interruption is None:
            self.value = self._measure(model)


def training_parts(tune: TuneConfig) -> int:
    """Returns the number of parts that the scheduler cuts a training into.

    Raises:
        UserError: there is no such scheduler, or it has no such option, or lacks one.
    """
    return make_scheduler(tune.scheduler).max_resource or 1


def _values(base: Mapping[str, Any], space: Space) -> dict[str, Any]:
    """Returns the values that the config has of the parameters of a space."""
    values: dict[str, Any] = {}
    for name in space.parameters:
        section: Any = base
        for key in setting_path(name):
            section = section.get(key) if isinstance(section, Mapping) else None
        if section is not None:
            values[name] = section
    return values


def _without_operations(trial: "TrainingTrial | OneShotTrial") -> dict[str, Any]:
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
                fix="search learning rate, schedule, weight decay, dropout or loss weights, or use asha",
            )
    if not config.train.checkpoint.enabled:
        what = "there are none, and a population goes on from them"
        raise UserError(what, where="train.checkpoint", fix="set train.checkpoint.every_seconds")
