"""Mistakes in a search of trainings are named before any work."""

import math
from pathlib import Path
from typing import Any

import pytest
from tune_records import RATES, RECORDS, job, tune_config

from posttrain.store.errors import UserError, WorkError
from posttrain.tune.trainings.search import tune_trainings


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"objectives": ["loss", "acuracy"]}, "tune.objectives: there is no metric `acuracy` here; did you mean `accu"),
        ({"objectives": ["loss", "loss"]}, "tune.objectives: `loss` is there twice"),
        (
            {"objectives": ["loss", "memory_bytes"]},
            "`memory_bytes` of a trial is not known where all trials run in one",
        ),
        ({"objectives": ["loss", "gpu_memory_bytes"]}, "is not known where there is no GPU; use memory_bytes"),
        (
            {"objectives": ["loss", "seconds"], "scheduler": {"name": "asha", "max_resource": 3}},
            "there are 2; use none",
        ),
        ({"objectives": ["loss", "seconds"], "sampler": "staged"}, "sampler: searches one objective, and there are 2"),
        (
            {"objectives": ["loss", "seconds"], "warm_start": "none"},
            "tune.warm_start: carries over the best settings",
        ),
        (
            {"objectives": ["loss", "seconds"], "choose": "accuracy within 1%"},
            "tune.choose: `accuracy within 1%`",
        ),
        ({}, "tune.budget: says nothing of what it may spend; give --budget 50 trials"),
        ({"budget": "lots"}, "tune.budget: `lots` is not a budget"),
        (
            {"space": {"lr": {"float": [0.1, 0.2]}}},
            "`lr` is not a setting of a training, and no formula has it; write train.lr",
        ),
        ({"space": {"lr": [0.1, 0.2], "train.epochs": [1, 2]}}, "tune.space: `lr` is not a setting of a training"),
        ({"space": {"a": [1, 2], "b": {"derive": "2 * a"}}}, "tune.space: a change no setting of a training"),
        ({"sampler": "tpee"}, "tune.sampler: there is no sampler `tpee`"),
        ({"initial": [{"train.epochs": 99}]}, "tune.initial: {train.epochs: 99} is not a point of the space"),
        ({"held_out": {"data": "20%", "scorer": "ngram"}}, "tune.held_out.scorer: there is no scorer `ngram`"),
        ({"space": {"train.lr": {"float": [0.1, 0.2]}}}, "tune.space: unknown key `train.lr`"),
        ({"space": {"train.epochs": {"int": [-1, 2]}}}, "`train.epochs`: Input should be greater than or equal to 1"),
        ({"space": {"train.epochs": {"int": [2, 1]}}}, "tune.space.train.epochs: 2 to 1 is not a range"),
        ({"metric": "acuracy"}, "tune.metric: there is no metric `acuracy` here; did you mean `accuracy`?"),
        ({"metric": "perplexity"}, "tune.metric: there is no metric `perplexity` here"),
        ({"scheduler": "best"}, "tune.scheduler: there is no scheduler `best`"),
        (
            {"scheduler": {"name": "asha", "max_resource": math.inf}},
            "tune.scheduler: `max_resource`: Input should be a finite number",
        ),
        ({"storage": "mysql://user@host/name"}, "tune.storage: `mysql` is not supported"),
        ({"storage": "postgresql://user:${MISSING}@host/name"}, "tune.storage: "),
        ({"held_out": "nothing.jsonl"}, "nothing.jsonl: there is no such file"),
    ],
)
def test_mistakes_are_named_before_any_work(
    tiny_model: Path, held_out_folder: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], problem: str
) -> None:
    monkeypatch.setattr(
        "posttrain.tune.trainings.search.data_features", lambda records: pytest.fail("it embeds records")
    )
    tune = tune_config(**({"budget": "2 trials"} if changes else {}) | changes)
    with pytest.raises(UserError) as error:
        tune_trainings(job(tiny_model), tune, RECORDS, held_out_folder / "out", root=held_out_folder)
    assert problem in str(error.value)
    assert not (held_out_folder / "out").exists()


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"held_out": "60%"}, "a share of more than 0% and at most 50% can be held out"),
        ({"held_out": "0%"}, "a share of more than 0%"),
        ({"held_outt": "10%"}, "unknown key `held_outt`"),
        ({"metric": "loss", "objectives": ["loss", "seconds"]}, "there are objectives, which take the place of metric"),
    ],
)
def test_mistakes_in_the_section(changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(UserError) as error:
        tune_config(**changes)
    assert problem in str(error.value)


@pytest.mark.parametrize(
    ("space", "train", "problem"),
    [
        ({"train.batch_size": [4, 8]}, {}, "`train.batch_size` cannot change while a training runs"),
        ({"train.lora.rank": [4, 8]}, {"method": "lora"}, "`train.lora.rank` cannot change while a training runs"),
        ({"train.optimizer.name": ["adamw", "sgd"]}, {}, "`train.optimizer.name` cannot change while"),
        ({"train.epochs": {"derive": "2 + 0 * train.learning_rate"}}, {}, "`train.epochs` cannot change while"),
        ({}, {"checkpoint": {"every_seconds": None}}, "train.checkpoint: there are none"),
    ],
)
def test_populations_of_what_cannot_change_are_refused(
    tiny_model: Path, held_out_folder: Path, space: dict[str, Any], train: dict[str, Any], problem: str
) -> None:
    tune = tune_config(space=RATES | space, scheduler={"name": "pbt", "max_resource": 3}, sampler=None, budget=4)
    with pytest.raises(UserError) as error:
        tune_trainings(job(tiny_model, **train), tune, RECORDS, held_out_folder / "out", root=held_out_folder)
    assert problem in str(error.value)
    assert not (held_out_folder / "out").exists()


def test_labels_that_do_not_fit_are_named_before_any_work(tiny_model: Path, held_out_folder: Path) -> None:
    config = job(tiny_model)
    config = config.model_copy(update={"task": config.task.model_copy(update={"labels": ["gold"]})})
    with pytest.raises(UserError, match=r"tune.held_out: .*: label `.*` is not in task.labels"):
        tune_trainings(config, tune_config(budget="2 trials"), RECORDS, held_out_folder / "out", root=held_out_folder)
    assert not (held_out_folder / "out").exists()


@pytest.mark.parametrize("objective", ["reward", "classification"])
@pytest.mark.parametrize("searched", [False, True])
def test_models_without_answers_are_refused_before_any_work(
    tiny_model: Path, held_out_folder: Path, objective: str, searched: bool
) -> None:
    train = {} if searched else {"objective": objective}
    tune = tune_config(budget="2 trials", space=RATES | ({"train.objective": ["sft", objective]} if searched else {}))
    where = "tune.space.train.objective" if searched else "train.objective"
    with pytest.raises(UserError, match=f"^{where}: `{objective}` makes a model that judges and does not answer"):
        tune_trainings(job(tiny_model, **train), tune, RECORDS, held_out_folder / "out", root=held_out_folder)
    assert not (held_out_folder / "out").exists()


def test_records_without_pairs_are_named_before_any_work(tiny_model: Path, held_out_folder: Path) -> None:
    tune = tune_config(budget="2 trials", metric="preference_accuracy")
    config = job(tiny_model, objective="kto")
    config = config.model_copy(update={"task": config.task.model_copy(update={"labels": None})})
    with pytest.raises(UserError, match=r"^tune.held_out: .* has no rejected answer; give each record `chosen` and"):
        tune_trainings(config, tune, RECORDS, held_out_folder / "out", root=held_out_folder)
    assert not (held_out_folder / "out").exists()


@pytest.mark.slow
def test_more_parts_than_steps_are_named(tiny_model: Path, held_out_folder: Path) -> None:
    tune = tune_config(budget="6 trials", scheduler={"name": "asha", "max_resource": 1000})
    with pytest.raises(WorkError, match=r"tune.scheduler.max_resource: a training has \d+ steps, and 1000 parts"):
        tune_trainings(job(tiny_model), tune, RECORDS, held_out_folder / "out", root=held_out_folder)
