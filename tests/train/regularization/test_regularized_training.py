"""Noise, smoothing and clipping in complete trainings."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch

from posttrain.models.task import TaskConfig
from posttrain.train import trainer
from posttrain.train.config import TrainConfig
from posttrain.train.data.loader import Batch
from posttrain.train.lora_config import LoraConfig
from posttrain.train.objectives.config import SftConfig
from posttrain.train.optim import loss_scale
from posttrain.train.optim.schedule import ScheduleConfig
from posttrain.train.regularization.config import NoiseConfig
from posttrain.train.stage import train

pytestmark = pytest.mark.slow

TASK = TaskConfig(system="Name the intent.")
SINGLE: dict[str, dict[str, Any]] = {
    "neftune": {"noise": NoiseConfig(neftune=5.0)},
    "dropout": {"noise": NoiseConfig(dropout=0.2)},
    "smoothing": {"objective": SftConfig(label_smoothing=0.1)},
}
COMBINED: dict[str, dict[str, Any]] = {
    "float16": {
        "precision": "float16",
        "noise": NoiseConfig(neftune=5.0, dropout=0.2),
        "objective": SftConfig(label_smoothing=0.1),
        "from_scratch": True,
        "micro_batch_tokens": 120,
    },
    "bfloat16": {
        "precision": "bfloat16",
        "noise": NoiseConfig(neftune=5.0),
    },
    "adapter": {
        "method": "lora",
        "lora": LoraConfig(rank=4, dropout=0.1),
        "noise": NoiseConfig(neftune=5.0, dropout=0.2),
    },
}


ONE_RATE = {"epochs": 1, "learning_rate": 0.05, "schedule": ScheduleConfig(name="constant", warmup=0)}


class Killed(BaseException):
    """Stands for the death of the process."""


def contents(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def run_training(source: Path, records: pa.Table, config: TrainConfig, folder: Path) -> dict[str, Any]:
    return train(source, records, config, TASK, seed=3, out=folder / "out", scratch=folder / "scratch")


def kill_at_step(step: int, work: Callable[[], object]) -> None:
    """Runs ``work`` in a process that dies after computing the gradients of this step."""
    original = trainer.Trainer.accumulate_gradients

    def die(self: Any, batch: Batch) -> Any:
        result = original(self, batch)
        if batch.step == step:
            raise Killed
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer.Trainer, "accumulate_gradients", die)
        with pytest.raises(Killed):
            work()


@pytest.fixture(scope="module")
def plain_weights(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., bytes]:
    """``plain_weights(records, config)``: the weights after training without regularization."""
    result: list[bytes] = []

    def weights(records: pa.Table, config: TrainConfig) -> bytes:
        if not result:
            folder = tmp_path_factory.mktemp("plain")
            run_training(tiny_model, records, config, folder)
            result.append((folder / "out" / "model.safetensors").read_bytes())
        return result[0]

    return weights


@pytest.mark.parametrize("name", SINGLE)
def test_each_setting_changes_the_weights_without_a_fault(
    tiny_model: Path,
    records: pa.Table,
    config: TrainConfig,
    tmp_path: Path,
    name: str,
    plain_weights: Callable[..., bytes],
) -> None:
    meta = run_training(tiny_model, records, config.model_copy(update=SINGLE[name]), tmp_path)
    assert meta["decisions"] == []
    assert meta["last_loss"] < meta["first_loss"]
    assert (tmp_path / "out" / "model.safetensors").read_bytes() != plain_weights(records, config)


@pytest.mark.parametrize(
    "name", ["bfloat16", *(pytest.param(name, marks=pytest.mark.long) for name in ("float16", "adapter"))]
)
def test_a_killed_training_ends_with_the_same_output(
    tiny_model: Path,
    records: pa.Table,
    checkpointed: TrainConfig,
    tmp_path: Path,
    name: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # So that the scale backs off and grows in a few steps.
    monkeypatch.setattr(loss_scale, "INITIAL", 2.0**20)
    monkeypatch.setattr(loss_scale, "GROWTH_INTERVAL", 2)
    config = checkpointed.model_copy(update=COMBINED[name])
    meta = run_training(tiny_model, records, config, tmp_path / "whole")

    def run() -> dict[str, Any]:
        torch.manual_seed(99)  # a new process has other generator states
        return run_training(tiny_model, records, config, tmp_path / "parts")

    kill_at_step(4, run)
    assert run() == meta
    assert contents(tmp_path / "parts" / "out") == contents(tmp_path / "whole" / "out")


def test_noise_is_not_in_the_saved_model(
    tiny_model: Path, records: pa.Table, config: TrainConfig, tmp_path: Path
) -> None:
    noise = NoiseConfig(neftune=5.0, dropout=0.2)
    run_training(tiny_model, records, config.model_copy(update={"noise": noise}), tmp_path)
    config_json = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (
        config_json["attention_dropout"]
        == json.loads((tiny_model / "config.json").read_text())["attention_dropout"]
        == 0
    )
