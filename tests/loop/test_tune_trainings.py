"""Studies of trainings: a trial is the training that one would have run, and is measured as `posttrain eval` does."""

import json
import math
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import yaml

from posttrain.data.records.record import concat
from posttrain.evaluate.suite import run_suite
from posttrain.loop.held_out import split_records
from posttrain.loop.measured_trial import metric_value
from posttrain.loop.tune_config import TuneConfig, apply_settings
from posttrain.loop.tune_trainings import TrainingTrial, tune_trainings
from posttrain.models.language_model import load_language_model
from posttrain.models.precision import choose_precision
from posttrain.models.task import TaskConfig
from posttrain.store.errors import UserError
from posttrain.store.hashing import file_digest
from posttrain.testing.steps import table_of
from posttrain.train.callbacks import CallbackList, TrainingStopped
from posttrain.train.config import can_change_on_resume
from posttrain.train.optim.schedule import scheduled_lr
from posttrain.train.standalone import TrainJobConfig, train_standalone
from posttrain.tune.context import TrialContext, TrialInterrupted
from posttrain.tune.schedulers.base import Decision

TRAIN = {"epochs": 3, "batch_size": 4, "precision": "float32"}


def rows(start: int, count: int) -> pa.Table:
    return table_of(
        *(
            {"prompt": f"message {n} about {'cards' if n % 2 else 'cash'}", "completion": "card" if n % 2 else "cash"}
            for n in range(start, start + count)
        )
    )


RECORDS, HELD_OUT = rows(0, 24), rows(100, 10)


def job(tiny_model: Path, **train: Any) -> TrainJobConfig:
    values = {"model": str(tiny_model), "data": "memory", "task": {"labels": ["card", "cash"]}}
    return TrainJobConfig.read({**values, "train": {**TRAIN, **train}}, "config")


def tune_config(**changes: Any) -> TuneConfig:
    space = {"train.learning_rate": {"float": [1e-4, 1e-2], "log": True}, "train.batch_size": [4, 8]}
    return TuneConfig.read({"space": space, "held_out": "held.jsonl", "sampler": "random", **changes}, "tune")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A folder with the file of held-out records."""
    held_out = [
        {"prompt": row["prompt"][-1]["content"], "completion": row["completion"]} for row in HELD_OUT.to_pylist()
    ]
    (tmp_path / "held.jsonl").write_text("".join(json.dumps(row) + "\n" for row in held_out))
    return tmp_path


class Reports:
    """The answers to a trial's reports."""

    def __init__(self, *decisions: Decision) -> None:
        self.decisions, self.reports, self.tokens = list(decisions), dict[int, float](), 0

    def __call__(self, step: int, value: float, tokens: int) -> Decision:
        assert self.reports.setdefault(step, value) == value
        self.tokens += tokens
        return self.decisions.pop(0) if self.decisions else Decision.CONTINUE


def trial(folder: Path, reports: Reports, start: int = 0, **settings: Any) -> TrialContext:
    folder.mkdir(exist_ok=True)
    return TrialContext(0, settings, folder, start, None, 0, reports)


def function(tiny_model: Path, parts: int, **train: Any) -> TrainingTrial:
    base = job(tiny_model, **train).model_dump(mode="json")
    suite = tune_config().suite(True)
    return TrainingTrial(
        base=base,
        model=str(tiny_model),
        records=RECORDS,
        held_out=HELD_OUT,
        suite=suite,
        metrics=("loss",),
        parts=parts,
    )


@pytest.mark.slow
def test_a_trial_in_parts_is_one_training(tiny_model: Path, tmp_path: Path) -> None:
    method = "lora"
    settings = {"train.learning_rate": 3e-3, "helper": 7}
    whole, parts, paused = Reports(), Reports(), Reports(Decision.CONTINUE, Decision.PAUSE)
    value = function(tiny_model, 1, method=method)(trial(tmp_path / "whole", whole, **settings))
    assert function(tiny_model, 3, method=method)(trial(tmp_path / "parts", parts, **settings)) == value
    with pytest.raises(TrialInterrupted):
        function(tiny_model, 3, method=method)(trial(tmp_path / "paused", paused, **settings))
    assert list(paused.reports) == [1, 2]
    assert function(tiny_model, 3, method=method)(trial(tmp_path / "paused", paused, start=2, **settings)) == value
    assert parts.reports == paused.reports
    assert (list(whole.reports), list(parts.reports)) == ([1], [1, 2, 3])
    assert whole.tokens == parts.tokens == paused.tokens > 0
    # It is the model of a training with these settings, and its loss is that of the model.
    config = job(tiny_model, method=method, learning_rate=3e-3)
    train_standalone(tmp_path / "alone", config, RECORDS, tiny_model)
    digests = {file_digest(path / "model.safetensors") for path in (tmp_path / "alone", *tmp_path.glob("*/model"))}
    assert len(digests) == 1
    lm = load_language_model(tmp_path / "alone", config.task, "float32")
    result = run_suite(lm, HELD_OUT, tune_config().suite(True), "held_out")
    likelihoods = result.predictions["log_likelihood"].to_pylist()
    assert value == pytest.approx(-math.fsum(likelihoods) / len(likelihoods), rel=1e-9)


@pytest.mark.slow
def test_a_kill_before_the_value_is_kept_costs_no_step(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"train.learning_rate": 3e-3}
    expected, reports = Reports(), Reports()
    value = function(tiny_model, 2)(trial(tmp_path / "expected", expected, **settings))
    run = function(tiny_model, 2)
    with monkeypatch.context() as patch:

        def killed(*arguments: object) -> None:
            raise KeyboardInterrupt

        patch.setattr("posttrain.loop.tune_trainings.write_atomically", killed)
        with pytest.raises(KeyboardInterrupt):
            run(trial(tmp_path / "killed", reports, **settings))
    assert not reports.reports
    assert run(trial(tmp_path / "killed", reports, **settings)) == value
    assert reports.reports == expected.reports


@pytest.mark.slow
def test_a_study(tiny_model: Path, root: Path) -> None:
    tune = tune_config(scheduler={"name": "successive_halving", "max_resource": 3}, budget="3 trials")
    config = job(tiny_model)

    def run(**options: Any) -> Any:
        return tune_trainings(config, tune, RECORDS, root / "out", root=root, **options)

    result = run()
    assert [str(trial.state) for trial in result.trials].count("finished") == 1
    assert [str(trial.state) for trial in result.trials].count("paused") == 2
    assert all(trial.tokens for trial in result.trials)
    best = yaml.safe_load((root / "out" / "best.yaml").read_text())
    read = TrainJobConfig.read(best, "best.yaml")
    assert read.train.learning_rate == result.settings["train.learning_rate"]
    assert read.train.epochs == 3
    # The model of the best trial is kept, and is the one that best.yaml trains.
    (model,) = (root / "out" / "trials").glob("*/model/model.safetensors")
    train_standalone(root / "again", read, RECORDS, tiny_model)
    assert file_digest(root / "again" / "model.safetensors") == file_digest(model)
    # The same call does nothing more, and a larger budget goes on, here in processes.
    assert run().trials == result.trials
    more = run(budget="4 trials", engine="processes", workers=1)
    assert more.trials[:3] == result.trials
    assert len(more.trials) == 4
    # Other data, other parts of a training, or another config, are another study.
    longer = tune_config(scheduler={"name": "successive_halving", "max_resource": 9}, budget="3 trials")
    with pytest.raises(UserError, match="the scheduler's max_resource: not as the study was begun"):
        tune_trainings(config, longer, RECORDS, root / "out", root=root)
    with pytest.raises(UserError, match="the training data: not as the study was begun"):
        tune_trainings(config, tune, rows(0, 22), root / "out", root=root)
    with pytest.raises(UserError, match="the rest of the config: not as the study was begun"):
        tune_trainings(job(tiny_model, epochs=4), tune, RECORDS, root / "out", root=root)
    with pytest.raises(UserError, match="the study searches the least held-out loss"):
        tune_trainings(config, tune_config(metric="accuracy"), RECORDS, root / "out", root=root, budget="3 trials")


@pytest.mark.slow
def test_a_study_of_several_objectives(tiny_model: Path, root: Path) -> None:
    space = {"train.learning_rate": {"float": [1e-4, 1e-2], "log": True}, "train.lora.rank": [2, 8]}
    objectives = ["loss", "accuracy", {"metric": "seconds", "limit": 1e6}, "tokens"]
    scheduler = {"name": "moasha", "max_resource": 3}
    tune = tune_config(space=space, objectives=objectives, scheduler=scheduler, budget="3 trials")
    config = job(tiny_model, method="lora")
    result = tune_trainings(config, tune, RECORDS, root / "out", root=root)
    assert result.front
    assert tune.metrics == ("loss", "accuracy")
    assert tune.several is not None
    assert tune.several.directions == (False, True, False, False)
    for trial in result.trials:
        assert trial.reports
        for report in trial.reports:
            assert report.values[2:] == (report.seconds, report.tokens)
            assert report.tokens > 0
    for trial in result.front:
        config_of = TrainJobConfig.read(yaml.safe_load((root / f"out/front/{trial.number:04d}.yaml").read_text()), "f")
        assert config_of.train.learning_rate == trial.settings["train.learning_rate"]
    # The kept model has the values of its trial.
    assert result.best is not None
    (model,) = (root / "out" / "trials").glob(f"{result.best.number:04d}/model")
    lm = load_language_model(model, config.task, choose_precision())
    suite = run_suite(lm, HELD_OUT, tune.suite(True), "held_out")
    assert result.values[:2] == pytest.approx((metric_value(suite, "loss"), suite.metrics["accuracy"]), abs=1e-6)
    again = tune_trainings(config, tune, RECORDS, root / "out", root=root)
    assert again.trials == result.trials
    with pytest.raises(UserError, match="the study searches the least loss, greatest accuracy, least seconds"):
        tune_trainings(config, tune_config(space=space), RECORDS, root / "out", root=root, budget="4 trials")


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
        ({"objectives": ["loss", "seconds"], "scheduler": {"name": "asha", "max_resource": 3}}, "use moasha or none"),
        ({"objectives": ["loss", "seconds"], "sampler": "cmaes"}, "sampler: searches one objective, and there are 2"),
        ({"objectives": ["loss", "seconds"], "sampler": "rgpe"}, "sampler: searches one objective, and there are 2"),
        ({"objectives": ["loss", "seconds"], "stop": {"gain": "1%"}}, "tune.stop: predicts the gain of one objective"),
        (
            {"objectives": ["loss", "seconds"], "warm_start": "none"},
            "tune.warm_start: carries over the best settings",
        ),
        (
            {"objectives": ["loss", "seconds"], "choose": "accuracy within 1%"},
            "tune.choose: `accuracy within 1%`",
        ),
        ({}, "tune.budget: says nothing of what it may spend; give --budget 50 trials"),
        ({"budget": "lots"}, "tune.budget: `lots` is no budget"),
        ({"space": {"lr": {"float": [0.1, 0.2]}}}, "tune.space: `lr` is no setting of a training; write train.lr"),
        ({"space": {"train.lr": {"float": [0.1, 0.2]}}}, "tune.space: unknown key `train.lr`"),
        ({"space": {"train.epochs": {"int": [-1, 2]}}}, "`train.epochs`: Input should be greater than or equal to 1"),
        ({"space": {"train.epochs": {"int": [2, 1]}}}, "tune.space.train.epochs: 2 to 1 is no range"),
        ({"metric": "acuracy"}, "tune.metric: there is no metric `acuracy` here; did you mean `accuracy`?"),
        ({"metric": "perplexity"}, "tune.metric: there is no metric `perplexity` here"),
        ({"scheduler": "best"}, "there is no scheduler `best`"),
        ({"held_out": "nothing.jsonl"}, "nothing.jsonl: there is no such file"),
    ],
)
def test_mistakes_are_named_before_any_work(
    tiny_model: Path, root: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], problem: str
) -> None:
    monkeypatch.setattr("posttrain.loop.tune_trainings.data_task", lambda records: pytest.fail("it embeds records"))
    tune = tune_config(**({"budget": "2 trials"} if changes else {}) | changes)
    with pytest.raises(UserError) as error:
        tune_trainings(job(tiny_model), tune, RECORDS, root / "out", root=root)
    assert problem in str(error.value)
    assert not (root / "out").exists()


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"held_out": "60%"}, "a share of more than 0% and at most 50% can be held out"),
        ({"held_out": "0%"}, "a share of more than 0%"),
        ({"stop": {"gain": "much"}}, "`much` is no gain"),
        ({"price": {"per_hour": 0}}, "`price.per_hour`: Input should be greater than 0"),
        ({"accelerators": 0}, "`accelerators`: Input should be greater than or equal to 1"),
        ({"held_outt": "10%"}, "unknown key `held_outt`"),
        ({"metric": "loss", "objectives": ["loss", "seconds"]}, "metric and maximize are of one objective"),
    ],
)
def test_mistakes_in_the_section(changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(UserError) as error:
        tune_config(**changes)
    assert problem in str(error.value)


@pytest.mark.parametrize(
    ("metric", "labels", "scorer", "maximized"),
    [
        ("loss", True, "label_likelihood", False),
        ("loss", False, "perplexity", False),
        ("accuracy", True, "label_likelihood", True),
        ("accuracy", False, "exact_match", True),
        ("perplexity", False, "perplexity", False),
        ("preference_accuracy", False, "preference", True),
        ("ece", True, "label_likelihood", False),
    ],
)
def test_the_metric_names_scorer_and_direction(metric: str, labels: bool, scorer: str, maximized: bool) -> None:
    tune = tune_config(metric=metric)
    assert tune.suite(labels).scorer == scorer
    assert tune.is_maximized is maximized
    assert tune_config(metric=metric, maximize=not maximized).is_maximized is not maximized


def test_the_loss_of_free_text_is_that_of_a_token(tiny_model: Path) -> None:
    lm = load_language_model(tiny_model, TaskConfig(), "float32")
    result = run_suite(lm, HELD_OUT, tune_config().suite(False), "held_out")
    assert metric_value(result, "loss") == pytest.approx(math.log(result.metrics["perplexity"]))
    assert metric_value(result, "perplexity") == result.metrics["perplexity"]


def test_a_share_is_held_out_by_the_records_themselves(tiny_model: Path, root: Path) -> None:
    tune, config = tune_config(held_out="25%"), job(tiny_model)
    training, held_out = split_records(RECORDS, tune, config, root)
    assert (training.num_rows, held_out.num_rows) == (18, 6)
    backwards, held_out_again = split_records(RECORDS.take(list(range(24))[::-1]), tune, config, root)
    assert set(held_out["id"].to_pylist()) == set(held_out_again["id"].to_pylist())
    assert set(training["id"].to_pylist()) == set(backwards["id"].to_pylist())
    assert not set(training["id"].to_pylist()) & set(held_out["id"].to_pylist())


def test_held_out_records_are_not_trained_on(
    tiny_model: Path, root: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("posttrain.loop.held_out.log.propagate", True)
    config = job(tiny_model)
    training, held_out = split_records(concat([RECORDS, HELD_OUT]), tune_config(), config, root)
    assert (training.num_rows, held_out.num_rows) == (24, 10)
    assert "10 of 34 training records are held out, and not trained on" in caplog.text
    with pytest.raises(UserError, match="leaves nothing to train on"):
        split_records(HELD_OUT, tune_config(), config, root)


def test_settings_are_laid_over_the_config() -> None:
    base = {"seed": 1, "train": {"epochs": 1, "lora": {"rank": 4}}}
    settings = {"train.lora.rank": 8, "train.optimizer.name": "lion", "helper": 3}
    assert apply_settings(base, settings) == {
        "seed": 1,
        "train": {"epochs": 1, "lora": {"rank": 8}, "optimizer": {"name": "lion"}},
    }
    assert base["train"] == {"epochs": 1, "lora": {"rank": 4}}


RATES = {"train.learning_rate": {"float": [1e-4, 1e-2], "log": True}}


@pytest.mark.slow
def test_a_child_is_the_checkpoint_of_its_parent_with_another_rate(tiny_model: Path, root: Path) -> None:
    scheduler = {"name": "pbt", "population": 2, "max_resource": 3}
    tune = tune_config(space=RATES, scheduler=scheduler, sampler=None, budget="3 trials")
    config = job(tiny_model, optimizer={"weight_decay": 0.1}, schedule={"name": "linear", "warmup": 0.1})
    result = tune_trainings(config, tune, RECORDS, root / "out", root=root)
    child = result.trials[2]
    assert child.fork is not None
    assert child.fork.step == 1
    rates = [result.trials[number].settings["train.learning_rate"] for number in (child.fork.parent, 2)]
    assert rates[0] != rates[1]
    # By hand: 6 of 18 steps at the parent's rate, a checkpoint, and the others at the child's.
    by_hand, plain = root / "by_hand", root / "plain"

    def train(out: Path, rate: float, stop: int | None = None) -> list[dict[str, Any]]:
        changed = apply_settings(config.model_dump(mode="json"), {"train.learning_rate": rate})
        callbacks = None if stop is None else CallbackList(lambda step: step.step + 1 == stop)
        job_config = TrainJobConfig.read(changed, "by hand")
        with suppress(TrainingStopped):
            train_standalone(out, job_config, RECORDS, tiny_model, fork=True, callbacks=callbacks)
        return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]

    train(by_hand, rates[0], stop=6)
    steps, unchanged = train(by_hand, rates[1]), train(plain, rates[0])
    factors = [scheduled_lr(config.train.schedule, 1.0, step, 18) for step in range(18)]
    expected = [rates[step >= 6] * factor for step, factor in enumerate(factors)]
    assert [step["lr"] for step in steps] == pytest.approx(expected, rel=1e-12)
    # Weights and data of step 6, before its update, are those of the training that kept its rate; moments too.
    for key in ("loss", "grad_norm", "tokens"):
        assert steps[6][key] == unchanged[6][key]
    assert steps[7]["loss"] != unchanged[7]["loss"]
    lm = load_language_model(by_hand, config.task, "float32")
    assert child.value == metric_value(run_suite(lm, HELD_OUT, tune.suite(True), "held_out"), "loss")
    # The best trial's model is kept; where it is the child's, it is the one that was trained by hand.
    assert result.best is not None
    kept = root / "out" / "trials" / f"{result.best.number:04d}" / "model" / "model.safetensors"
    if result.best.number == 2:
        assert file_digest(kept) == file_digest(by_hand / "model.safetensors")
        text = (root / "out" / "best.yaml").read_text()
        schedule = yaml.safe_load("".join(line[2:] for line in text.splitlines(True)[2:] if line.startswith("# ")))
        assert [entry["steps"] for entry in schedule["schedule"]] == [[1, 1], [2, 3]]
        assert TrainJobConfig.read(yaml.safe_load(text), "best.yaml").train.learning_rate == rates[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"optimizer": {"weight_decay": 0.0}}, {"optimizer": {"weight_decay": 0.5, "betas": [0.8, 0.9]}}),
        ({"method": "lora", "lora": {"dropout": 0.0}}, {"method": "lora", "lora": {"dropout": 0.3}}),
        ({"sft": {"label_smoothing": 0.0}}, {"sft": {"label_smoothing": 0.2, "focal": 1.0}}),
        ({"ema": {"decay": 0.05}}, {"ema": {"decay": 0.3}}),
        ({"schedule": {"name": "linear"}}, {"schedule": {"name": "cosine", "final_rate": 0.1}, "clip": 0.1}),
    ],
)
def test_settings_that_may_change_on_resume_do(
    tiny_model: Path, tmp_path: Path, before: dict[str, Any], after: dict[str, Any]
) -> None:
    """The steps before the change are the first training's, and the model is not."""

    def train(out: Path, options: dict[str, Any], stop: int | None = None) -> list[float]:
        callbacks = None if stop is None else CallbackList(lambda step: step.step + 1 == stop)
        with suppress(TrainingStopped):
            config = job(tiny_model, learning_rate=1e-2, **{"epochs": 1, **options})
            train_standalone(out, config, RECORDS, tiny_model, fork=True, callbacks=callbacks)
        return [json.loads(line)["loss"] for line in (out / "metrics.jsonl").read_text().splitlines()]

    train(tmp_path / "changed", before, stop=3)
    options = {"changed": after, "first": before}
    changed, first = (train(tmp_path / name, values) for name, values in options.items())
    assert changed[:3] == first[:3]
    assert len(changed) == len(first) == 6
    models = {file_digest(tmp_path / name / "model.safetensors") for name in options}
    assert len(models) == 2


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
    tiny_model: Path, root: Path, space: dict[str, Any], train: dict[str, Any], problem: str
) -> None:
    tune = tune_config(space=RATES | space, scheduler={"name": "pbt", "max_resource": 3}, sampler=None, budget=4)
    with pytest.raises(UserError) as error:
        tune_trainings(job(tiny_model, **train), tune, RECORDS, root / "out", root=root)
    assert problem in str(error.value)
    assert not (root / "out").exists()


@pytest.mark.parametrize(
    ("key", "can"),
    [
        *[("learning_rate", True), ("optimizer.weight_decay", True), ("noise.dropout.attention", True)],
        *[("dpo.beta", True), ("lora.dropout", True), ("schedule.warmup", True), ("distill.hard_weight", True)],
        *[("lora.rank", False), ("lora.alpha", False), ("optimizer.name", False), ("max_length", False)],
        *[("distill.hidden_weight", False), ("epochs", False), ("learning_rate_of_something", False)],
    ],
)
def test_keys_that_can_change_on_resume(key: str, can: bool) -> None:
    assert can_change_on_resume(key) is can
