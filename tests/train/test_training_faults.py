"""Planted faults during training: the training recovers by itself and reports its decisions."""

import errno
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch

from posttrain.data.records.record import RECORD
from posttrain.models.language_model import LanguageModel
from posttrain.models.packing import Packed
from posttrain.models.task import TaskConfig
from posttrain.store.errors import WorkError
from posttrain.train.checkpoint import writer as checkpoint_write
from posttrain.train.config import TrainConfig
from posttrain.train.monitor.decisions import POLICIES
from posttrain.train.monitor.detectors import LossDivergence, Plateau
from posttrain.train.objectives.loss import Loss
from posttrain.train.objectives.sft import SftObjective
from posttrain.train.stage import train

pytestmark = pytest.mark.slow

TASK = TaskConfig(system="Name the intent.")
Spoil = Callable[[Loss, list[int]], Loss]


@pytest.fixture
def long_config(checkpointed: TrainConfig) -> TrainConfig:
    return checkpointed.model_copy(update={"epochs": 10, "learning_rate": 1e-3})


def patch_loss(monkeypatch: pytest.MonkeyPatch, spoil: Spoil) -> None:
    loss = SftObjective.loss

    def spoiled_loss(self: SftObjective, lm: LanguageModel, packed: Packed, rows: list[int]) -> Loss:
        return spoil(loss(self, lm, packed, rows), list(rows))

    monkeypatch.setattr(SftObjective, "loss", spoiled_loss)


def at_step(number: int, factor: float, repeat: bool = False) -> Spoil:
    """Multiplies the loss of the ``number``-th micro-batch (one per step here), or of all from there on."""
    calls = 0

    def spoil(loss: Loss, rows: list[int]) -> Loss:
        nonlocal calls
        calls += 1
        affected = calls > number if repeat else calls == number + 1
        return Loss(loss.sum * factor, loss.count, loss.metrics) if affected else loss

    return spoil


def run_training(source: Path, records: pa.Table, config: TrainConfig, folder: Path, seed: int = 3) -> dict[str, Any]:
    return train(source, records, config, TASK, seed=seed, out=folder / "out", scratch=folder / "scratch")


@dataclass(frozen=True)
class CleanTraining:
    """A training without a fault.

    Args:
        source, records, config: of the training.
        summary: of the training.
        noise: largest difference of its last loss from that of another seed.
    """

    source: Path
    records: pa.Table
    config: TrainConfig
    summary: dict[str, Any]
    noise: float

    def run(self, folder: Path) -> dict[str, Any]:
        return run_training(self.source, self.records, self.config, folder)


@pytest.fixture(scope="module")
def clean_training(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> CleanTraining:
    """Thirty steps. Each prompt has two answers, so that the loss ends at a floor, and a step more matters little."""
    rows = [(prompt, answer) for prompt in ("card", "money", "hello", "top up") for answer in ("a", "b")]
    records = pa.Table.from_pylist(
        [
            {"id": f"{line:020x}", "prompt": [{"role": "user", "content": prompt}], "completion": answer, "line": line}
            for line, (prompt, answer) in enumerate(rows, 1)
        ],
        schema=RECORD,
    )
    config = TrainConfig.read(
        {
            "epochs": 15,
            "batch_size": 4,
            "learning_rate": 3e-3,
            "precision": "float32",
            "micro_batch_tokens": 4096,
            "schedule": {"warmup": 0.3},
            "checkpoint": {"every_seconds": None, "every_steps": 3, "background": True},
        },
        "train",
    )
    folder = tmp_path_factory.mktemp("clean")
    summary, *others = (run_training(tiny_model, records, config, folder / str(seed), seed) for seed in range(3, 6))
    noise = max(abs(other["last_loss"] - summary["last_loss"]) for other in others)
    assert summary["decisions"] == []
    assert noise < 0.05 * summary["last_loss"] < 0.01 * summary["first_loss"], "noise hides no failure"
    return CleanTraining(tiny_model, records, config, summary, noise)


def test_a_training_recovers_from_one_bad_batch(
    clean_training: CleanTraining, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    patch_loss(monkeypatch, at_step(20, float("inf")))
    result = clean_training.run(tmp_path)
    assert [(item["kind"], item["step"]) for item in result["decisions"]] == [("nan", 20)]
    assert result["steps"] == clean_training.summary["steps"]
    assert abs(result["last_loss"] - clean_training.summary["last_loss"]) <= clean_training.noise


def test_a_step_with_an_exploding_gradient_is_skipped(
    tiny_model: Path, records: pa.Table, long_config: TrainConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    patch_loss(monkeypatch, at_step(12, 100.0))
    result = run_training(tiny_model, records, long_config, tmp_path)
    decided = [(item["kind"], item["action"], item["step"]) for item in result["decisions"]]
    assert decided == [("explosion", "skip", 12)]
    assert result["steps"] == 30
    assert result["last_loss"] < 0.4 * result["first_loss"]


def test_out_of_memory_halves_the_micro_batch(
    clean_training: CleanTraining,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The step is repeated in smaller micro-batches, which all later steps keep; the losses stay the same."""
    errors = 2
    remaining, sizes = errors, []

    def spoil(loss: Loss, rows: list[int]) -> Loss:
        nonlocal remaining
        sizes.append(len(rows))
        if remaining and len(sizes) > 20:
            remaining -= 1
            raise torch.OutOfMemoryError("planted")
        return loss

    patch_loss(monkeypatch, spoil)
    result = clean_training.run(tmp_path)
    assert sum(message.startswith("out of memory at step 20: ") for message in caplog.messages) == errors
    assert sizes[:20] == [4] * 20
    assert max(sizes[20 + errors :]) == 4 // 2**errors, "the micro-batches are smaller"
    assert sum(sizes[20 + errors :]) == 10 * 4, "and no example is skipped"
    assert result["decisions"] == []
    assert result["steps"] == clean_training.summary["steps"]
    assert result["last_loss"] == pytest.approx(clean_training.summary["last_loss"], rel=1e-3)
    assert abs(result["last_loss"] - clean_training.summary["last_loss"]) <= clean_training.noise


def test_out_of_memory_with_one_example_stops_the_training(
    tiny_model: Path, records: pa.Table, long_config: TrainConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def spoil(loss: Loss, rows: list[int]) -> Loss:
        raise torch.OutOfMemoryError("planted")

    patch_loss(monkeypatch, spoil)
    with pytest.raises(WorkError, match=r"out of memory with one example of [0-9]+ tokens at a time; set ") as caught:
        run_training(tiny_model, records, long_config, tmp_path)
    assert "\n" not in str(caught.value)


def test_a_resumed_training_keeps_the_smaller_micro_batch(
    clean_training: CleanTraining, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A training that is killed afterwards does not run out of memory again."""
    sizes: list[int] = []

    def spoil(loss: Loss, rows: list[int]) -> Loss:
        sizes.append(len(rows))
        if len(sizes) == 8:
            raise torch.OutOfMemoryError("planted")
        if len(sizes) == 15:
            raise KeyboardInterrupt
        return loss

    patch_loss(monkeypatch, spoil)
    with pytest.raises(KeyboardInterrupt):
        clean_training.run(tmp_path)
    result = clean_training.run(tmp_path)
    assert sizes[:8] == [4] * 8
    assert max(sizes[8:15]) == max(sizes[15:]) == 2
    assert result["last_loss"] == pytest.approx(clean_training.summary["last_loss"], rel=1e-3)


def test_a_temporarily_full_disk_does_not_stop_the_training(
    clean_training: CleanTraining, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Training continues without the checkpoints of that time, and reports each."""
    attempts = 0
    write_tensors = checkpoint_write.write_tensors

    def write_or_fail(*arguments: Any, **options: Any) -> Any:
        nonlocal attempts
        attempts += 1
        if 4 <= attempts < 7:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write_tensors(*arguments, **options)

    monkeypatch.setattr(checkpoint_write, "write_tensors", write_or_fail)
    result = clean_training.run(tmp_path)
    messages = [message for message in caplog.messages if message.startswith("no checkpoint of step ")]
    assert [message.split()[4] for message in messages] == ["12", "15", "18"]
    assert all("no space left on device): training continues without it" in message for message in messages)
    assert attempts == 9, "every checkpoint is attempted, except at the last step"
    assert result == clean_training.summary
    names = sorted(path.name for path in (tmp_path / "scratch" / "checkpoints").glob("step-*"))
    assert names == ["step-000000024", "step-000000027"]


def test_without_a_checkpoint_repeated_nans_stop_the_training(
    tiny_model: Path, records: pa.Table, long_config: TrainConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    no_checkpoints = long_config.model_copy(
        update={"checkpoint": long_config.checkpoint.model_copy(update={"every_steps": None})}
    )
    patch_loss(monkeypatch, at_step(5, float("nan"), repeat=True))
    with pytest.raises(WorkError, match=r"stopped at step 10: .*5 skips .* did not help, and there is no checkpoint"):
        run_training(tiny_model, records, no_checkpoints, tmp_path)


def test_an_unrecoverable_training_stops_with_a_one_line_error(
    tiny_model: Path, records: pa.Table, long_config: TrainConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    patch_loss(monkeypatch, at_step(5, float("nan"), repeat=True))
    with pytest.raises(WorkError, match="training stopped at step") as caught:
        run_training(tiny_model, records, long_config, tmp_path)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_a_kill_does_not_undo_an_earlier_decision(
    tiny_model: Path, records: pa.Table, long_config: TrainConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bad batch is skipped, whether the training was killed later or not."""
    long_config = long_config.model_copy(update={"epochs": 5})
    steps, kill_at = 0, -1

    def spoil(loss: Loss, rows: list[int]) -> Loss:
        nonlocal steps
        steps += 1
        if steps == kill_at:
            raise KeyboardInterrupt
        return Loss(loss.sum * float("nan"), loss.count, loss.metrics) if steps == 8 else loss

    with monkeypatch.context() as patch:
        patch_loss(patch, spoil)
        expected = run_training(tiny_model, records, long_config, tmp_path / "whole")
        steps, kill_at = 0, 12
        with pytest.raises(KeyboardInterrupt):
            run_training(tiny_model, records, long_config, tmp_path / "parts")
    resumed = run_training(tiny_model, records, long_config, tmp_path / "parts")
    assert resumed == expected
    for name in ("model.safetensors", "training.json"):
        assert (tmp_path / "parts" / "out" / name).read_bytes() == (tmp_path / "whole" / "out" / name).read_bytes()


def test_a_nan_step_survives_a_kill(
    tiny_model: Path, records: pa.Table, long_config: TrainConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its NaN is in the checkpoint, although JSON has no NaN."""
    every_5_steps = long_config.model_copy(
        update={"epochs": 4, "checkpoint": long_config.checkpoint.model_copy(update={"every_steps": 5})}
    )
    calls = 0

    def spoil(loss: Loss, rows: list[int]) -> Loss:
        nonlocal calls
        calls += 1
        if calls == 8:
            raise KeyboardInterrupt
        return Loss(loss.sum * float("nan"), loss.count, loss.metrics) if calls == 2 else loss

    with monkeypatch.context() as patch:
        patch_loss(patch, spoil)
        with pytest.raises(KeyboardInterrupt):
            run_training(tiny_model, records, every_5_steps, tmp_path)
    result = run_training(tiny_model, records, every_5_steps, tmp_path)
    log = json.loads((tmp_path / "out" / "training.json").read_text())
    assert [step["step"] for step in log if step["loss"] is None] == [1]
    assert result["last_loss"] < result["first_loss"]


def test_a_divergence_rolls_back_as_far_as_checkpoints_reach(
    tiny_model: Path,
    records: pa.Table,
    long_config: TrainConfig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It starts at step 15 and is detected at step 18; with only two checkpoints, the older one must do."""
    monkeypatch.setitem(POLICIES, "normal", POLICIES["normal"] | {"explosion": "warn"})
    for name in ("WINDOW", "PATIENCE"):
        monkeypatch.setattr(LossDivergence, name, 3)
    changes = {
        "epochs": 8,
        "checkpoint": long_config.checkpoint.model_copy(update={"keep_last": 2}),
    }
    calls = 0

    def spoil(loss: Loss, rows: list[int]) -> Loss:
        nonlocal calls
        calls += 1
        return Loss(loss.sum + 30 * loss.count, loss.count, loss.metrics) if 16 <= calls < 20 else loss

    patch_loss(monkeypatch, spoil)
    result = run_training(tiny_model, records, long_config.model_copy(update=changes), tmp_path)
    decision = next(item for item in result["decisions"] if item["kind"] == "divergence")
    assert (decision["action"], decision["since"], decision["step"]) == ("rollback", 15, 18)
    assert result["steps"] == 24
    assert calls == 24 + 19 - 17
    interventions = json.loads((tmp_path / "scratch" / "notes.json").read_text())["interventions"]
    assert interventions == {
        "skipped_steps": [15, 16, 17, 18],
        "lr_scale": 1.0,
        "rollback_lr_scale": 1.0,
        "rollbacks": 1,
    }


def test_lowering_the_rate_skips_no_step(
    tiny_model: Path, records: pa.Table, long_config: TrainConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(POLICIES, "normal", POLICIES["normal"] | {"plateau": "lower_rate"})
    monkeypatch.setattr(Plateau, "WINDOW", 10)
    monkeypatch.setattr(Plateau, "IMPROVEMENT", 50.0)
    changes = {
        "epochs": 5,
        "schedule": long_config.schedule.model_copy(update={"name": "constant", "warmup": 0.0}),
    }
    result = run_training(tiny_model, records, long_config.model_copy(update=changes), tmp_path)
    (first, *_) = (item for item in result["decisions"] if item["kind"] == "plateau")
    log = json.loads((tmp_path / "out" / "training.json").read_text())
    rates = [step["lr"] for step in log]
    assert rates[first["step"]] == 2 * rates[first["step"] + 1]
    assert json.loads((tmp_path / "scratch" / "notes.json").read_text())["interventions"] == {}
