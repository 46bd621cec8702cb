"""One-shot studies: trials are sub-networks of one training, and the best is exported."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from posttrain.evaluate.suite import run_suite
from posttrain.models.language_model import load_language_model
from posttrain.models.precision import choose_precision
from posttrain.store.errors import UserError
from posttrain.store.hashing import file_digest
from posttrain.testing.steps import table_of
from posttrain.train.standalone import TrainJobConfig, train_standalone
from posttrain.train.supernet import add_subnetwork
from posttrain.train.trainer import Trainer
from posttrain.tune.api import TuneResult
from posttrain.tune.trainings.config import TuneConfig
from posttrain.tune.trainings.measured_trial import metric_value
from posttrain.tune.trainings.one_shot import OneShotTrial
from posttrain.tune.trainings.search import tune_trainings

ATTENTION, FIRST = "train.lora.ranks.self_attn.*", "train.lora.ranks.layers.0.mlp.*"
SPACE = {ATTENTION: [0, 2, 4], FIRST: [0, 2, 8]}
LORA = {"rank": 4, "alpha": 16, "ranks": {"layers.1.mlp.*": 0}}
TRAIN = {"epochs": 2, "batch_size": 4, "precision": "float32", "learning_rate": 0.01, "method": "lora", "lora": LORA}


def rows(start: int, count: int) -> list[dict[str, Any]]:
    return [
        {"prompt": f"message {n} about {'cards' if n % 2 else 'cash'}", "completion": "card" if n % 2 else "cash"}
        for n in range(start, start + count)
    ]


RECORDS, HELD_OUT = table_of(*rows(0, 24)), rows(100, 10)


def job(tiny_model: Path, **train: Any) -> TrainJobConfig:
    values = {"model": str(tiny_model), "data": "memory", "task": {"labels": ["card", "cash"]}}
    return TrainJobConfig.read({**values, "train": {**TRAIN, **train}}, "config")


def tune_config(**changes: Any) -> TuneConfig:
    values = {"space": SPACE, "held_out": "held.jsonl", "one_shot": True, "budget": "6 trials"}
    return TuneConfig.read({**values, **changes}, "tune")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A folder with the file of held-out records."""
    (tmp_path / "held.jsonl").write_text("".join(json.dumps(row) + "\n" for row in HELD_OUT))
    return tmp_path


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        result: torch.Tensor = model.eval()(input_ids=torch.tensor([[5, 6, 7, 8, 9]])).logits.float()
    return result


@pytest.mark.slow
def test_a_study_measures_and_exports_subnetworks(tiny_model: Path, root: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    config, out = job(tiny_model), root / "out"

    def run(**options: Any) -> TuneResult:
        return tune_trainings(config, tune_config(), RECORDS, out, root=root, **options)

    result = run()
    assert result.best is not None
    # One training for all trials.
    metrics = (out / "supernet" / "metrics.jsonl").read_bytes()
    assert len(metrics.splitlines()) == 12
    assert len({tuple(trial.settings.values()) for trial in result.trials}) > 2
    for trial in result.trials:
        ranks = LORA["ranks"] | {"self_attn.*": trial.settings[ATTENTION], "layers.0.mlp.*": trial.settings[FIRST]}
        if not any(ranks.values()):
            assert trial.error == "no module has an adapter"
            continue
        lora = config.train.lora.model_copy(update={"ranks": ranks})
        base = load_language_model(tiny_model, config.task, "float32")
        lm = add_subnetwork(base, out / "supernet" / "adapter", lora)
        lm.model.eval()
        suite = run_suite(lm, table_of(*HELD_OUT), tune_config().suite(True), "held_out")
        assert trial.value == pytest.approx(metric_value(suite, "loss"), rel=1e-5)
    best = yaml.safe_load((out / "best.yaml").read_text())
    read = TrainJobConfig.read(best, "best.yaml")
    assert read.train.lora.ranks == {"layers.1.mlp.*": 0, **{k[17:]: v for k, v in result.settings.items()}}
    assert read.train.lora.supernet == config.train.lora.supernet
    # The exported model, merged and as an adapter, has the value of its trial.
    model = out / "model"
    lm = load_language_model(model, config.task, choose_precision())
    suite = run_suite(lm, table_of(*HELD_OUT), tune_config().suite(True), "held_out")
    assert metric_value(suite, "loss") == pytest.approx(result.value, abs=0.02)  # saved in bfloat16
    merged = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    base = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    adapted = PeftModel.from_pretrained(base, model / "adapter")
    expected = add_subnetwork(
        load_language_model(tiny_model, config.task, "float32"), out / "supernet" / "adapter", read.train.lora
    )
    torch.testing.assert_close(logits(adapted), logits(expected.model), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(logits(merged), logits(expected.model), atol=0.1, rtol=0.05)
    settings = json.loads((model / "adapter" / "adapter_config.json").read_text())
    assert settings["base_model_name_or_path"] == str(tiny_model)
    assert set(settings["rank_pattern"].values()) <= set(read.train.lora.ranks.values())
    # The same call does nothing more; a larger budget continues, and trains nothing again.
    digest = file_digest(model / "model.safetensors")
    assert run().trials == result.trials
    assert file_digest(model / "model.safetensors") == digest
    more = run(budget="8 trials")
    assert more.trials[:6] == result.trials
    assert all(math.isfinite(trial.value or 0.0) for trial in more.trials)
    assert (out / "supernet" / "metrics.jsonl").read_bytes() == metrics
    # Trainings are another study.
    with pytest.raises(UserError, match="the rest of the config: not as the study was begun"):
        tune_trainings(config, tune_config(one_shot=False), RECORDS, out, root=root)
    # What best.yaml names can be trained alone.
    summary = train_standalone(root / "alone", read, RECORDS, tiny_model)
    assert summary["steps"] == 12


@pytest.mark.slow
def test_a_killed_study_has_the_same_result(tiny_model: Path, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = {"every_seconds": None, "every_steps": 1, "background": False}
    config = job(tiny_model, checkpoint=checkpoint, lora={**LORA, "dropout": 0.1})

    def run(name: str) -> TuneResult:
        return tune_trainings(config, tune_config(), RECORDS, root / name, root=root)

    whole = run("whole")
    steps, measured = 0, 0
    train_step, measure = Trainer.train_step, OneShotTrial.measure

    class Killed(BaseException):
        """Stands for the death of the process."""

    def count_step(self: Trainer, step: int) -> None:
        nonlocal steps
        if steps in (3, 7):
            steps += 1
            raise Killed
        steps += 1
        train_step(self, step)

    def count_trial(*arguments: Any) -> Any:
        nonlocal measured
        measured += 1
        if measured == 3:
            raise Killed
        return measure(*arguments)

    monkeypatch.setattr(Trainer, "train_step", count_step)
    monkeypatch.setattr(OneShotTrial, "measure", count_trial)
    for _ in range(3):
        with pytest.raises(Killed):
            run("killed")
    result = run("killed")
    assert steps == 12 + 2
    assert [trial.settings for trial in result.trials] == [trial.settings for trial in whole.trials]
    assert [trial.value for trial in result.trials] == [trial.value for trial in whole.trials]
    for file in ("model/model.safetensors", "model/adapter/adapter_model.safetensors"):
        assert file_digest(root / "killed" / file) == file_digest(root / "whole" / file)


@pytest.mark.parametrize(
    ("changes", "train", "problem"),
    [
        ({"space": {**SPACE, "train.learning_rate": {"float": [1e-4, 1e-2]}}}, {}, "searches choices of ranks alone"),
        (
            {"space": {**SPACE, "helper": [1, 2]}},
            {},
            "`helper` is not a setting of a training, and no formula has it",
        ),
        ({"space": {**SPACE, ATTENTION: 4}}, {}, f"tune.space.{ATTENTION}: one_shot searches choices of ranks alone"),
        ({"space": {"train.lora.rank": [2, 4]}}, {}, "tune.space.train.lora.rank: one_shot searches choices of ranks"),
        ({"space": {**SPACE, FIRST: {"choice": [0, 2], "when": f"{1} > 0"}}}, {}, "without conditions"),
        ({}, {"method": "full"}, "tune.one_shot: searches ranks of LoRA, and all weights are trained"),
        ({}, {"objective": "reward"}, "train.objective: `reward` makes a model that judges"),
        ({"scheduler": {"name": "asha", "max_resource": 3}}, {}, "tune.scheduler: compares trainings before their end"),
        ({"scheduler": {"name": "none", "max_resource": 3}}, {}, "tune.scheduler: compares trainings before their end"),
        (
            {},
            {"lora": {**LORA, "ranks": {"q_proj": 4}, "supernet": {"q_proj": [4]}}},
            "train.lora.supernet: is what one_shot sets",
        ),
        (
            {"space": {"train.lora.ranks.nothing": [0, 2, 4]}},
            {},
            "train.lora.ranks: `nothing` matches no adapted module",
        ),
        ({"space": {ATTENTION: [0, -2]}}, {}, "Input should be greater than or equal to 0"),
    ],
)
def test_mistakes_are_named_before_any_work(
    tiny_model: Path, root: Path, changes: dict[str, Any], train: dict[str, Any], problem: str
) -> None:
    with pytest.raises(UserError) as error:
        tune_trainings(job(tiny_model, **train), tune_config(**changes), RECORDS, root / "out", root=root)
    assert problem in str(error.value)
    assert not (root / "out").exists()
