"""float16 weights with dynamic loss scaling, in complete trainings."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

from posttrain.models.language_model import LanguageModel
from posttrain.models.packing import Packed
from posttrain.models.task import TaskConfig
from posttrain.store.errors import WorkError
from posttrain.train.checkpoint.config import CheckpointConfig
from posttrain.train.config import TrainConfig
from posttrain.train.objectives.loss import Loss
from posttrain.train.objectives.sft import SftObjective
from posttrain.train.optim import loss_scale
from posttrain.train.stage import train

pytestmark = pytest.mark.slow

TASK = TaskConfig(system="Name the intent.")
NO_CHECKPOINTS = CheckpointConfig(every_seconds=None)
Steps = list[dict[str, Any]]


@pytest.fixture(autouse=True)
def _a_scale_that_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Starts with a scale at which the tiny model's gradients do not overflow."""
    monkeypatch.setattr(loss_scale, "INITIAL", 2.0**10)


@pytest.fixture
def run(tiny_model: Path, records: pa.Table, config: TrainConfig, tmp_path: Path) -> Callable[..., Steps]:
    """``run("name", epochs=4)``: trains in float16 and returns the values of every step."""

    def train_with(name: str, **changes: Any) -> Steps:
        run_config = config.model_copy(
            update={"precision": "float16", "epochs": 4, "checkpoint": NO_CHECKPOINTS, **changes}
        )
        folder = tmp_path / name
        train(tiny_model, records, run_config, TASK, seed=3, out=folder / "out", scratch=folder / "scratch")
        result: Steps = json.loads((folder / "out" / "training.json").read_text())
        return result

    return train_with


def plant_gradient_factor(monkeypatch: pytest.MonkeyPatch, calls: set[int], factor: float) -> None:
    """Multiplies the gradient, not the loss, of these micro-batches (one per step here), or of all if none is named."""
    loss, call = SftObjective.loss, -1

    def loss_with_factor(self: SftObjective, lm: LanguageModel, packed: Packed, rows: list[int]) -> Loss:
        nonlocal call
        result = loss(self, lm, packed, rows)
        call += 1
        if call in calls or not calls:
            result.sum.register_hook(lambda gradient: gradient * factor)
        return result

    monkeypatch.setattr(SftObjective, "loss", loss_with_factor)


def test_the_trajectory_is_near_float32(run: Callable[..., Steps]) -> None:
    reference = run("float32", precision="float32")
    result = run("float16")
    residuals = np.array(
        [step["loss"] / reference_step["loss"] - 1 for step, reference_step in zip(result, reference, strict=True)]
    )
    assert 0 < np.abs(residuals).max() < 0.02
    assert abs(residuals.mean()) < 0.005
    norms = np.array(
        [
            step["grad_norm"] / reference_step["grad_norm"] - 1
            for step, reference_step in zip(result, reference, strict=True)
        ]
    )
    assert np.abs(norms).max() < 0.1, "norms are those of the gradients without the scale"
    assert {step["loss_scale"] for step in result} == {2.0**10}
    assert {step["loss_scale"] for step in reference} == {None}


def test_a_far_too_large_scale_is_reduced(run: Callable[..., Steps], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss_scale, "INITIAL", 2.0**22)
    steps = run("large", epochs=8)
    scale = 2.0**22
    overflow_count = 0
    for step in steps:
        assert step["loss_scale"] == scale
        overflowed = step["grad_norm"] is None
        assert (step["update_ratio"] is None) == overflowed, "a step that overflowed updates nothing"
        scale, overflow_count = (scale / 2, overflow_count + 1) if overflowed else (scale, overflow_count)
    assert 5 < overflow_count < 25
    assert steps[4]["grad_norm"] is None, "the first steps all overflow"
    assert steps[-1]["loss"] < 0.5 * steps[0]["loss"]


def test_an_overflow_skips_one_step(run: Callable[..., Steps], monkeypatch: pytest.MonkeyPatch) -> None:
    expected = run("clean")
    plant_gradient_factor(monkeypatch, {5}, float("inf"))
    steps = run("planted")
    assert [step["grad_norm"] is None for step in steps] == [number == 5 for number in range(12)]
    assert [step["loss_scale"] for step in steps] == [2.0**10] * 6 + [2.0**9] * 6
    assert [step["loss"] for step in steps[:6]] == [step["loss"] for step in expected[:6]]
    assert steps[-1]["loss"] == pytest.approx(expected[-1]["loss"], rel=0.2)


def test_the_monitor_does_not_observe_an_overflow(
    tiny_model: Path, records: pa.Table, config: TrainConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant_gradient_factor(monkeypatch, {2, 3}, float("inf"))
    float16_config = config.model_copy(update={"precision": "float16"})
    meta = train(tiny_model, records, float16_config, TASK, seed=3, out=tmp_path / "out", scratch=tmp_path / "s")
    assert meta["decisions"] == []


def test_the_monitor_handles_a_nan_loss(
    tiny_model: Path, records: pa.Table, config: TrainConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loss, calls = SftObjective.loss, 0

    def loss_with_nan(self: SftObjective, lm: LanguageModel, packed: Packed, rows: list[int]) -> Loss:
        nonlocal calls
        calls += 1
        result = loss(self, lm, packed, rows)
        return Loss(result.sum * torch.nan, result.count) if calls == 3 else result

    monkeypatch.setattr(SftObjective, "loss", loss_with_nan)
    float16_config = config.model_copy(update={"precision": "float16"})
    meta = train(tiny_model, records, float16_config, TASK, seed=3, out=tmp_path / "out", scratch=tmp_path / "s")
    assert [decision["kind"] for decision in meta["decisions"]] == ["nan"]


def test_the_loss_scale_grows_during_a_training(run: Callable[..., Steps], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss_scale, "INITIAL", 64.0)
    monkeypatch.setattr(loss_scale, "GROWTH_INTERVAL", 5)
    steps = run("growing")
    assert [step["loss_scale"] for step in steps] == [64.0] * 5 + [128.0] * 5 + [256.0] * 2


def test_a_training_stops_if_no_scale_helps(run: Callable[..., Steps], monkeypatch: pytest.MonkeyPatch) -> None:
    plant_gradient_factor(monkeypatch, set(), float("inf"))
    monkeypatch.setattr(loss_scale, "INITIAL", 16.0)
    with pytest.raises(
        WorkError, match=r"in 5 steps, .*even with the loss scaled by 1; train with train\.precision=bfloat16"
    ):
        run("never", epochs=10)
