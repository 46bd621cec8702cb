"""float16 weights with dynamic loss scaling, in whole trainings."""

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
from posttrain.train.optim.loss_scale import ScalingConfig
from posttrain.train.stage import train

pytestmark = pytest.mark.slow

TASK = TaskConfig(system="Name the intent.")
NEVER = CheckpointConfig(every_seconds=None)
Steps = list[dict[str, Any]]


@pytest.fixture
def run(tiny_model: Path, records: pa.Table, config: TrainConfig, tmp_path: Path) -> Callable[..., Steps]:
    """``run("name", epochs=4)``: train in float16 and give every step's values."""

    def go(name: str, **changes: Any) -> Steps:
        changed = config.model_copy(update={"precision": "float16", "epochs": 4, "checkpoint": NEVER, **changes})
        folder = tmp_path / name
        train(tiny_model, records, changed, TASK, seed=3, out=folder / "out", scratch=folder / "scratch")
        result: Steps = json.loads((folder / "out" / "training.json").read_text())
        return result

    return go


def planted(monkeypatch: pytest.MonkeyPatch, calls: set[int], factor: float) -> None:
    """Multiply the gradient, not the loss, of these micro-batches (one a step here), or of all for no calls."""
    loss, call = SftObjective.loss, -1

    def changed(self: SftObjective, lm: LanguageModel, packed: Packed, rows: list[int]) -> Loss:
        nonlocal call
        result = loss(self, lm, packed, rows)
        call += 1
        if call in calls or not calls:
            result.sum.register_hook(lambda gradient: gradient * factor)
        return result

    monkeypatch.setattr(SftObjective, "loss", changed)


def test_the_trajectory_is_near_float32(run: Callable[..., Steps]) -> None:
    exact = run("float32", precision="float32")
    result = run("float16", scaling=ScalingConfig(initial=2.0**10))
    residuals = np.array([first["loss"] / other["loss"] - 1 for first, other in zip(result, exact, strict=True)])
    assert 0 < np.abs(residuals).max() < 0.02
    assert abs(residuals.mean()) < 0.005
    norms = np.array([first["grad_norm"] / other["grad_norm"] - 1 for first, other in zip(result, exact, strict=True)])
    assert np.abs(norms).max() < 0.1, "norms are those of the gradients without the scale"
    assert {step["loss_scale"] for step in result} == {2.0**10}
    assert {step["loss_scale"] for step in exact} == {None}


def test_a_scale_that_is_far_too_large_is_left_behind(run: Callable[..., Steps]) -> None:
    steps = run("large", epochs=12, scaling=ScalingConfig(initial=2.0**26))
    scale = 2.0**26
    lost = 0
    for step in steps:
        assert step["loss_scale"] == scale
        overflowed = step["grad_norm"] is None
        assert (step["update_ratio"] is None) == overflowed, "a step that overflowed updates nothing"
        scale, lost = (scale / 2, lost + 1) if overflowed else (scale, lost)
    assert 5 < lost < 25
    assert steps[4]["grad_norm"] is None, "the first steps all overflow"
    assert steps[-1]["loss"] < 0.5 * steps[0]["loss"]


@pytest.mark.parametrize("factor", [float("inf"), float("nan")])
def test_one_overflow_is_a_step_left_out(
    run: Callable[..., Steps], monkeypatch: pytest.MonkeyPatch, factor: float
) -> None:
    clean = run("clean", scaling=ScalingConfig(initial=2.0**10), epochs=6)
    planted(monkeypatch, {7}, factor)
    steps = run("planted", scaling=ScalingConfig(initial=2.0**10), epochs=6)
    assert [step["grad_norm"] is None for step in steps] == [number == 7 for number in range(18)]
    assert [step["loss_scale"] for step in steps] == [2.0**10] * 8 + [2.0**9] * 10
    assert [step["loss"] for step in steps[:8]] == [step["loss"] for step in clean[:8]]
    assert steps[-1]["loss"] == pytest.approx(clean[-1]["loss"], rel=0.2)


def test_the_watch_is_not_told_of_an_overflow(
    tiny_model: Path, records: pa.Table, config: TrainConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planted(monkeypatch, {2, 3}, float("inf"))
    half = config.model_copy(update={"precision": "float16"})
    meta = train(tiny_model, records, half, TASK, seed=3, out=tmp_path / "out", scratch=tmp_path / "s")
    assert meta["decisions"] == []


def test_a_loss_that_is_no_number_is_the_watchs_business(
    tiny_model: Path, records: pa.Table, config: TrainConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loss, calls = SftObjective.loss, 0

    def spoilt(self: SftObjective, lm: LanguageModel, packed: Packed, rows: list[int]) -> Loss:
        nonlocal calls
        calls += 1
        result = loss(self, lm, packed, rows)
        return Loss(result.sum * torch.nan, result.count) if calls == 3 else result

    monkeypatch.setattr(SftObjective, "loss", spoilt)
    half = config.model_copy(update={"precision": "float16", "scaling": ScalingConfig(initial=2.0**10)})
    meta = train(tiny_model, records, half, TASK, seed=3, out=tmp_path / "out", scratch=tmp_path / "s")
    assert [decision["kind"] for decision in meta["decisions"]] == ["nan"]


def test_the_scale_grows(run: Callable[..., Steps]) -> None:
    steps = run("growing", scaling=ScalingConfig(initial=64.0, growth_interval=5))
    assert [step["loss_scale"] for step in steps] == [64.0] * 5 + [128.0] * 5 + [256.0] * 2


def test_where_no_scale_helps(run: Callable[..., Steps], monkeypatch: pytest.MonkeyPatch) -> None:
    planted(monkeypatch, set(), float("inf"))
    with pytest.raises(WorkError, match=r"even with the loss scaled by 1; train with train\.precision=bfloat16"):
        run("never", scaling=ScalingConfig(initial=16.0), epochs=10)
