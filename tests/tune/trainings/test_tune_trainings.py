"""Studies of trainings: a trial is the training that one would have run, and is measured as `posttrain eval` does."""

import json
import math
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import yaml
from tune_records import HELD_OUT, RATES, RECORDS, job, rows, tune_config

from posttrain.data.records.record import concat
from posttrain.evaluate.suite import run_suite
from posttrain.models.language_model import load_language_model
from posttrain.models.precision import choose_precision
from posttrain.models.task import TaskConfig
from posttrain.store.errors import UserError
from posttrain.store.hashing import file_digest
from posttrain.train.callbacks import CallbackList, TrainingStopped
from posttrain.train.config import can_change_on_resume
from posttrain.train.optim.schedule import scheduled_lr
from posttrain.train.standalone import TrainJobConfig, train_standalone
from posttrain.tune.context import TrialContext, TrialInterrupted
from posttrain.tune.schedulers.base import Decision
from posttrain.tune.trainings.held_out import split_records
from posttrain.tune.trainings.measured_trial import metric_value
from posttrain.tune.trainings.search import tune_trainings
from posttrain.tune.trainings.settings import apply_settings
from posttrain.tune.trainings.training_trial import TrainingTrial
from posttrain.tune.trial import TrialState


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

        patch.setattr("posttrain.tune.trainings.training_trial.write_atomically", killed)
        with pytest.raises(KeyboardInterrupt):
            run(trial(tmp_path / "killed", reports, **settings))
    assert not reports.reports
    assert run(trial(tmp_path / "killed", reports, **settings)) == value
    assert reports.reports == expected.reports


@pytest.mark.slow
def test_a_run_that_ends_between_two_parts_costs_no_step(tiny_model: Path, tmp_path: Path) -> None:
    settings, steps = {"train.learning_rate": 3e-3}, list[int]()
    expected, reports = Reports(), Reports()
    value = function(tiny_model, 2)(trial(tmp_path / "expected", expected, **settings))

    def show_life() -> bool:
        steps.append(len(steps))
        return len(steps) not in (2, 3)

    for _ in range(2):
        run = TrialContext(0, settings, tmp_path / "cut", 0, None, 0, reports, show_life)
        run.folder.mkdir(exist_ok=True)
        with pytest.raises(TrialInterrupted):
            function(tiny_model, 2)(run)
    assert not reports.reports
    run = TrialContext(0, settings, tmp_path / "cut", 0, None, 0, reports, show_life)
    assert function(tiny_model, 2)(run) == value
    assert reports.reports == expected.reports
    lines = (tmp_path / "cut" / "model" / "metrics.jsonl").read_text().splitlines()
    assert len(steps) == len(lines)


@pytest.mark.parametrize(("values", "silence"), [({}, 3600.0), ({"silence": 90}, 90.0)])
def test_the_silence_of_the_config_is_that_of_the_engine(
    values: dict[str, Any], silence: float, tiny_model: Path, held_out_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Opened(Exception):
        pass

    def open_engine(name: str, trial: object, workers: int | None, seconds: float) -> None:
        raise Opened(name, workers, seconds)

    monkeypatch.setattr("posttrain.tune.trainings.search.open_trials", open_engine)
    tune = tune_config(budget="1 trial", engine="processes", workers=3, **values)
    with pytest.raises(Opened) as opened:
        tune_trainings(job(tiny_model), tune, RECORDS, held_out_folder / "out", root=held_out_folder)
    assert opened.value.args == ("processes", 3, silence)


@pytest.mark.slow
def test_a_study(tiny_model: Path, held_out_folder: Path) -> None:
    tune = tune_config(scheduler={"name": "successive_halving", "max_resource": 3}, budget="3 trials")
    config = job(tiny_model)

    def run(**options: Any) -> Any:
        return tune_trainings(config, tune, RECORDS, held_out_folder / "out", root=held_out_folder, **options)

    result = run()
    assert [str(trial.state) for trial in result.trials].count("finished") == 1
    assert [str(trial.state) for trial in result.trials].count("paused") == 2
    assert all(trial.tokens for trial in result.trials)
    best = yaml.safe_load((held_out_folder / "out" / "best.yaml").read_text())
    read = TrainJobConfig.read(best, "best.yaml")
    assert read.train.learning_rate == result.settings["train.learning_rate"]
    assert read.train.epochs == 3
    # The model of the best trial is kept, and is the one that best.yaml trains.
    (model,) = (held_out_folder / "out" / "trials").glob("*/model/model.safetensors")
    train_standalone(held_out_folder / "again", read, RECORDS, tiny_model)
    assert file_digest(held_out_folder / "again" / "model.safetensors") == file_digest(model)
    # The same call does nothing more, and a larger budget continues, here in processes.
    assert run().trials == result.trials
    more = run(budget="4 trials", engine="processes", workers=1)
    assert more.trials[:3] == result.trials
    assert len(more.trials) == 4
    # Other data, other parts of a training, or another config, are another study.
    longer = tune_config(scheduler={"name": "successive_halving", "max_resource": 9}, budget="3 trials")
    with pytest.raises(UserError, match="the scheduler's max_resource: not as the study was begun"):
        tune_trainings(config, longer, RECORDS, held_out_folder / "out", root=held_out_folder)
    with pytest.raises(UserError, match="the training data: not as the study was begun"):
        tune_trainings(config, tune, rows(0, 22), held_out_folder / "out", root=held_out_folder)
    with pytest.raises(UserError, match="the rest of the config: not as the study was begun"):
        tune_trainings(job(tiny_model, epochs=4), tune, RECORDS, held_out_folder / "out", root=held_out_folder)
    with pytest.raises(UserError, match="the study searches the least held-out loss"):
        tune_trainings(
            config,
            tune_config(metric="accuracy"),
            RECORDS,
            held_out_folder / "out",
            root=held_out_folder,
            budget="3 trials",
        )


@pytest.mark.slow
def test_a_training_whose_last_report_spends_the_budget_is_finished(tiny_model: Path, held_out_folder: Path) -> None:
    study = (tune_config(), RECORDS, held_out_folder / "out")
    result = tune_trainings(job(tiny_model, epochs=1), *study, root=held_out_folder, budget="2 tokens")
    assert [entry.state for entry in result.trials] == [TrialState.FINISHED]


@pytest.mark.long
def test_a_study_of_several_objectives(tiny_model: Path, held_out_folder: Path) -> None:
    space = {"train.learning_rate": {"float": [1e-4, 1e-2], "log": True}, "train.lora.rank": [2, 8]}
    objectives = ["loss", "accuracy", {"metric": "seconds", "limit": 1e6}, "tokens"]
    scheduler = {"name": "none", "max_resource": 3}
    tune = tune_config(space=space, objectives=objectives, scheduler=scheduler, budget="3 trials")
    config = job(tiny_model, method="lora")
    result = tune_trainings(config, tune, RECORDS, held_out_folder / "out", root=held_out_folder)
    assert result.front
    assert tune.metrics == ("loss", "accuracy")
    assert tune.searched.directions == (False, True, False, False)
    for trial in result.trials:
        assert trial.reports
        for report in trial.reports:
            assert report.values[2:] == (report.seconds, report.tokens)
            assert report.tokens > 0
    for trial in result.front:
        config_of = TrainJobConfig.read(
            yaml.safe_load((held_out_folder / f"out/front/{trial.number:04d}.yaml").read_text()), "f"
        )
        assert config_of.train.learning_rate == trial.settings["train.learning_rate"]
    # The kept model has the values of its trial.
    assert result.best is not None
    (model,) = (held_out_folder / "out" / "trials").glob(f"{result.best.number:04d}/model")
    lm = load_language_model(model, config.task, choose_precision())
    suite = run_suite(lm, HELD_OUT, tune.suite(True), "held_out")
    assert result.values[:2] == pytest.approx((metric_value(suite, "loss"), suite.metrics["accuracy"]), abs=1e-6)
    again = tune_trainings(config, tune, RECORDS, held_out_folder / "out", root=held_out_folder)
    assert again.trials == result.trials
    with pytest.raises(UserError, match="the study searches the least loss, greatest accuracy, least seconds"):
        tune_trainings(
            config, tune_config(space=space), RECORDS, held_out_folder / "out", root=held_out_folder, budget="4 trials"
        )


def test_the_loss_of_free_text_is_that_of_a_token(tiny_model: Path) -> None:
    lm = load_language_model(tiny_model, TaskConfig(), "float32")
    result = run_suite(lm, HELD_OUT, tune_config().suite(False), "held_out")
    assert metric_value(result, "loss") == pytest.approx(math.log(result.metrics["perplexity"]))
    assert metric_value(result, "perplexity") == result.metrics["perplexity"]


def test_a_share_is_held_out_by_the_records_themselves(tiny_model: Path, held_out_folder: Path) -> None:
    tune, config = tune_config(held_out="25%"), job(tiny_model)
    training, held_out = split_records(RECORDS, tune, config, held_out_folder)
    assert (training.num_rows, held_out.num_rows) == (18, 6)
    backwards, held_out_again = split_records(RECORDS.take(list(range(24))[::-1]), tune, config, held_out_folder)
    assert set(held_out["id"].to_pylist()) == set(held_out_again["id"].to_pylist())
    assert set(training["id"].to_pylist()) == set(backwards["id"].to_pylist())
    assert not set(training["id"].to_pylist()) & set(held_out["id"].to_pylist())


def test_held_out_records_are_not_trained_on(
    tiny_model: Path, held_out_folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("posttrain.tune.trainings.held_out.log.propagate", True)
    config = job(tiny_model)
    training, held_out = split_records(concat([RECORDS, HELD_OUT]), tune_config(), config, held_out_folder)
    assert (training.num_rows, held_out.num_rows) == (24, 10)
    assert "10 of 34 training records are held out, and not trained on" in caplog.text
    with pytest.raises(UserError, match="leaves nothing to train on"):
        split_records(HELD_OUT, tune_config(), config, held_out_folder)


@pytest.mark.slow
def test_a_child_is_the_checkpoint_of_its_parent_with_another_rate(tiny_model: Path, held_out_folder: Path) -> None:
    scheduler = {"name": "pbt", "population": 2, "max_resource": 3}
    tune = tune_config(space=RATES, scheduler=scheduler, sampler=None, budget="3 trials")
    config = job(tiny_model, optimizer={"weight_decay": 0.1}, schedule={"name": "linear", "warmup": 0.1})
    result = tune_trainings(config, tune, RECORDS, held_out_folder / "out", root=held_out_folder)
    child = result.trials[2]
    assert child.fork is not None
    assert child.fork.step == 1
    rates = [result.trials[number].settings["train.learning_rate"] for number in (child.fork.parent, 2)]
    assert rates[0] != rates[1]
    # By hand: 6 of 18 steps at the parent's rate, a checkpoint, and the others at the child's.
    by_hand, plain = held_out_folder / "by_hand", held_out_folder / "plain"

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
    kept = held_out_folder / "out" / "trials" / f"{result.best.number:04d}" / "model" / "model.safetensors"
    if result.best.number == 2:
        assert file_digest(kept) == file_digest(by_hand / "model.safetensors")
        text = (held_out_folder / "out" / "best.yaml").read_text()
        schedule = yaml.safe_load("".join(line[2:] for line in text.splitlines(True)[2:] if line.startswith("# ")))
        assert [entry["steps"] for entry in schedule["schedule"]] == [[1, 1], [2, 3]]
        assert TrainJobConfig.read(yaml.safe_load(text), "best.yaml").train.learning_rate == rates[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"optimizer": {"weight_decay": 0.0}}, {"optimizer": {"weight_decay": 0.5, "betas": [0.8, 0.9]}}),
        ({"method": "lora", "lora": {"dropout": 0.0}}, {"method": "lora", "lora": {"dropout": 0.3}}),
        ({"objective": {"label_smoothing": 0.0}}, {"objective": {"label_smoothing": 0.2, "focal": 1.0}}),
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
    ("key", "can"),
    [
        *[("learning_rate", True), ("optimizer.weight_decay", True), ("noise.dropout", True)],
        *[("objective.beta", True), ("lora.dropout", True), ("schedule.warmup", True), ("objective.hard_weight", True)],
        *[("lora.rank", False), ("lora.alpha", False), ("optimizer.name", False), ("max_length", False)],
        *[
            ("objective.name", False),
            ("objective", False),
            ("objective.hidden_weight", False),
            ("epochs", False),
            ("learning_rate_of_something", False),
        ],
    ],
)
def test_keys_that_can_change_on_resume(key: str, can: bool) -> None:
    assert can_change_on_resume(key) is can
