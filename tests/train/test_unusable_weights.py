"""No training ends in a model with NaN or infinite weights, or in one that no step has changed."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from safetensors.torch import load_file, save_file

from posttrain.models.language_model import LanguageModel
from posttrain.models.packing import Packed
from posttrain.models.task import TaskConfig
from posttrain.store.errors import UserError, WorkError
from posttrain.train.config import TrainConfig
from posttrain.train.monitor.decisions import POLICIES
from posttrain.train.objectives.loss import Loss
from posttrain.train.objectives.sft import SftObjective
from posttrain.train.optim import loss_scale
from posttrain.train.optim.schedule import ScheduleConfig
from posttrain.train.stage import train

Run = Callable[..., dict[str, Any]]


@pytest.fixture
def run(tiny_model: Path, records: pa.Table, config: TrainConfig, tmp_path: Path) -> Run:
    """``run(**settings)``: one step on all records, or as the settings say; returns the summary."""

    def train_with(source: Path = tiny_model, **settings: Any) -> dict[str, Any]:
        defaults = {"epochs": 1, "batch_size": 10, "schedule": ScheduleConfig(name="constant", warmup=0)}
        run_config = config.model_copy(update=defaults | settings)
        folder = tmp_path / "run"
        return train(source, records, run_config, TaskConfig(), seed=3, out=folder / "out", scratch=folder / "scratch")

    return train_with


def scale_gradient(monkeypatch: pytest.MonkeyPatch, factor: float) -> None:
    """Multiplies each gradient, not the loss."""
    loss = SftObjective.loss

    def loss_with_factor(self: SftObjective, lm: LanguageModel, packed: Packed, rows: list[int]) -> Loss:
        result = loss(self, lm, packed, rows)
        result.sum.register_hook(lambda gradient: gradient * factor)
        return result

    monkeypatch.setattr(SftObjective, "loss", loss_with_factor)


@pytest.mark.parametrize(("rate", "settings"), [(1e39, {}), (float("inf"), {"method": "lora"})], ids=["full", "lora"])
def test_one_step_at_a_huge_rate_writes_no_model(run: Run, tmp_path: Path, rate: float, settings: Any) -> None:
    with pytest.raises(WorkError, match=r"training left NaN or infinite numbers in tensor \S+,.* train.learning_rate"):
        run(learning_rate=rate, **settings)
    assert not list((tmp_path / "run" / "out").glob("**/*.safetensors"))


def test_a_base_model_that_is_not_finite_is_refused(run: Run, tiny_model: Path, tmp_path: Path) -> None:
    base = tmp_path / "base"
    base.mkdir()
    for file in tiny_model.iterdir():
        (base / file.name).write_bytes(file.read_bytes())
    weights = load_file(base / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"][3, 4] = float("inf")
    save_file(weights, base / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"tensor model\.layers\.1\.mlp\.up_proj\.weight holds NaN or infinite numbers"):
        run(base)


def test_float16_that_always_overflows_is_an_error(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Too few steps for the scale to reach its minimum."""
    scale_gradient(monkeypatch, float("inf"))
    with pytest.raises(WorkError, match=r"overflowed at every step: all 6 were skipped.*train\.precision=bfloat16"):
        run(precision="float16", batch_size=5, epochs=3)
    assert not (tmp_path / "run" / "out" / "model.safetensors").exists()


def test_a_training_whose_steps_were_all_skipped_is_an_error(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    scale_gradient(monkeypatch, float("nan"))
    monkeypatch.setitem(POLICIES, "normal", POLICIES["normal"] | {"nan": "skip"})
    with pytest.raises(WorkError, match="all 2 steps were skipped, and nothing was learned"):
        run(batch_size=5)


def test_a_last_epoch_without_a_finite_loss_leaves_no_model(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first steps were good: not all were skipped, and the weights are finite."""
    monkeypatch.setitem(POLICIES, "normal", dict.fromkeys(POLICIES["normal"], "skip"))
    with pytest.raises(WorkError, match="no step of the last epoch had a finite loss"):
        run(learning_rate=2e5, batch_size=5, epochs=3)
    assert not (tmp_path / "run" / "out" / "model.safetensors").exists()


@pytest.mark.slow
def test_the_summary_counts_skipped_steps(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss_scale, "INITIAL", 2.0**18)
    assert run(epochs=2)["skipped_steps"] == 0
    summary = run(epochs=12, precision="float16")
    steps = json.loads((tmp_path / "run" / "out" / "training.json").read_text())
    assert 0 < summary["skipped_steps"] == sum(step["grad_norm"] is None for step in steps) < 12


def test_a_rate_that_destroys_the_model_is_reported_within_ten_steps(run: Run) -> None:
    """A rate of 30 takes the loss from 5.5 to thousands: the rate is lowered, and the second time training stops."""
    with pytest.raises(WorkError, match=r"training stopped at step \d+: loss .* after 5\.\d+ at first, above 11\.\d+"):
        run(learning_rate=30.0, epochs=30)
