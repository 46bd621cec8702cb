"""What goes wrong while training, planted: the training survives on its own and says what it did."""

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

from posttrain.data.records.schema import RECORD
from posttrain.models.language_model import LanguageModel
from posttrain.models.packing import Packed
from posttrain.models.task import TaskConfig
from posttrain.store.errors import WorkError
from posttrain.train.checkpoint import writer as checkpoint_write
from posttrain.train.config import TrainConfig
from posttrain.train.monitor.config import MonitorConfig
from posttrain.train.objectives.loss import Loss
from posttrain.train.objectives.sft import SftObjective
from posttrain.train.stage import train

pytestmark = pytest.mark.slow

TASK = TaskConfig(system="Name the intent.")
Spoil = Callable[[Loss, list[int]], Loss]


@pytest.fixture
def long(config: TrainConfig) -> TrainConfig:
    return config.model_copy(update={"epochs": 10, "learning_rate": 1e-3})


def spoilt(monkeypatch: pytest.MonkeyPatch, spoil: Spoil) -> None:
    loss = SftObjective.loss

    def changed(self: SftObjective, lm: LanguageModel, packed: Packed, rows: list[int]) -> Loss:
        return spoil(loss(self, lm, packed, rows), list(rows))

    monkeypatch.setattr(SftObjective, "loss", changed)


def at_step(number: int, factor: float, again: bool = False) -> Spoil:
    """Multiply the loss of the ``number``-th micro-batch (one a step here) by a factor, or of all from there on."""
    calls = 0

    def spoil(loss: Loss, rows: list[int]) -> Loss:
        nonlocal calls
        calls += 1
        hit = calls > number if again else calls == number + 1
        return Loss(loss.sum * factor, loss.count, loss.metrics) if hit else loss

    return spoil


def trained(source: Path, records: pa.Table, config: TrainConfig, folder: Path, seed: int = 3) -> dict[str, Any]:
    return train(source, records, config, TASK, seed=seed, out=folder / "out", scratch=folder / "scratch")


@dataclass(frozen=True)
class Clean:
    """A training in which nothing goes wrong.

    Args:
        source, records, config: of it.
        summary: its own.
        noise: how far from its last loss those of other seeds lie at most.
    """

    source: Path
    records: pa.Table
    config: TrainConfig
    summary: dict[str, Any]
    noise: float

    def again(self, folder: Path) -> dict[str, Any]:
        return trained(self.source, self.records, self.config, folder)


@pytest.fixture(scope="module")
def clean(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Clean:
    """Forty steps. Each prompt has two answers, so that the loss ends on a floor, and one step more matters little."""
    rows = [(asked, said) for asked in ("card", "money", "hello", "top up") for said in ("a", "b")]
    records = pa.Table.from_pylist(
        [
            {"id": f"{line:020x}", "prompt": [{"role": "user", "content": asked}], "completion": said, "line": line}
            for line, (asked, said) in enumerate(rows, 1)
        ],
        schema=RECORD,
    )
    config = TrainConfig.read(
        {
            "epochs": 20,
            "batch_size": 4,
            "learning_rate": 3e-3,
            "precision": "float32",
            "micro_batch_tokens": 4096,
            "schedule": {"warmup": 0.3},
            "checkpoint": {"every_seconds": None, "every_steps": 2, "background": True},
        },
        "train",
    )
    folder = tmp_path_factory.mktemp("clean")
    result, *others = (trained(tiny_model, records, config, folder / str(seed), seed) for seed in range(3, 8))
    noise = max(abs(other["last_loss"] - result["last_loss"]) for other in others)
    assert result["decisions"] == []
    assert noise < 0.05 * result["last_loss"] < 0.01 * result["first_loss"], "noise hides no failure"
    return Clean(tiny_model, records, config, result, noise)


@pytest.mark.parametrize("factor", [float("nan"), float("inf"), 100.0])
def test_one_bad_batch(clean: Clean, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, factor: float) -> None:
    spoilt(monkeypatch, at_step(24, factor))
    result = clean.again(tmp_path)
    if factor != 100:  # gradients have shrunk so much by then that 100 times as much is clipped, and no outlier
        assert [(item["kind"], item["step"]) for item in result["decisions"]] == [("nan", 24)]
    assert result["steps"] == clean.summary["steps"]
    assert abs(result["last_loss"] - clean.summary["last_loss"]) <= clean.noise


def test_a_gradient_that_is_far_too_large(
    tiny_model: Path, records: pa.Table, long: TrainConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoilt(monkeypatch, at_step(12, 100.0))
    result = trained(tiny_model, records, long, tmp_path)
    decided = [(item["kind"], item["action"], item["step"]) for item in result["decisions"]]
    assert decided == [("explosion", "skip", 12)]
    assert result["steps"] == 30
    assert result["last_loss"] < 0.4 * result["first_loss"]


@pytest.mark.parametrize("times", [1, 2])
def test_memory_runs_out(
    clean: Clean, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, times: int
) -> None:
    """The step is done again in smaller micro-batches, and so are all that follow; the losses stay the same."""
    left, sizes = times, []

    def spoil(loss: Loss, rows: list[int]) -> Loss:
        nonlocal left
        sizes.append(len(rows))
        if left and len(sizes) > 24:
            left -= 1
            raise torch.OutOfMemoryError("planted")
        return loss

    spoilt(monkeypatch, spoil)
    result = clean.again(tmp_path)
    assert sum(message.startswith("out of memory at step 24: ") for message in caplog.messages) == times
    assert sizes[:24] == [4] * 24
    assert max(sizes[24 + times :]) == 4 // 2**times, "the micro-batches are smaller"
    assert sum(sizes[24 + times :]) == 16 * 4, "and no example is left out"
    assert result["decisions"] == []
    assert result["steps"] == clean.summary["steps"]
    assert result["last_loss"] == pytest.approx(clean.summary["last_loss"], rel=1e-3)
    assert abs(result["last_loss"] - clean.summary["last_loss"]) <= clean.noise


def test_memory_runs_out_for_one_example(
    tiny_model: Path, records: pa.Table, long: TrainConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def spoil(loss: Loss, rows: list[int]) -> Loss:
        raise torch.OutOfMemoryError("planted")

    spoilt(monkeypatch, spoil)
    with pytest.raises(WorkError, match=r"out of memory with one example of [0-9]+ tokens at a time; set ") as caught:
        trained(tiny_model, records, long, tmp_path)
    assert "\n" not in str(caught.value)


def test_memory_that_ran_out_is_remembered(clean: Clean, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A training that is killed afterwards does not run into it again."""
    sizes: list[int] = []

    def spoil(loss: Loss, rows: list[int]) -> Loss:
        sizes.append(len(rows))
        if len(sizes) == 8:
            raise torch.OutOfMemoryError("planted")
        if len(sizes) == 15:
            raise KeyboardInterrupt
        return loss

    spoilt(monkeypatch, spoil)
    with pytest.raises(KeyboardInterrupt):
        clean.again(tmp_path)
    result = clean.again(tmp_path)
    assert sizes[:8] == [4] * 8
    assert max(sizes[8:15]) == max(sizes[15:]) == 2
    assert result["last_loss"] == pytest.approx(clean.summary["last_loss"], rel=1e-3)


def test_a_disk_that_is_full_for_a_while(
    clean: Clean, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Training continues without the checkpoints of that time, and says so for each."""
    tried = 0
    write_tensors = checkpoint_write.write_tensors

    def full(*arguments: Any, **options: Any) -> Any:
        nonlocal tried
        tried += 1
        if 5 <= tried < 8:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write_tensors(*arguments, **options)

    monkeypatch.setattr(checkpoint_write, "write_tensors", full)
    result = clean.again(tmp_path)
    said = [message for message in caplog.messages if message.startswith("no checkpoint of step ")]
    assert [message.split()[4] for message in said] == ["10", "12", "14"]
    assert all("no space left on device): training continues without it" in message for message in said)
    assert tried == 19, "all are tried, but for the last step"
    assert result == clean.summary
    kept = sorted(path.name for path in (tmp_path / "scratch" / "checkpoints").glob("step-*"))
    assert kept == ["step-000000036", "step-000000038"]


def test_without_a_checkpoint_the_gradient_is_left_out(
    tiny_model: Path, records: pa.Table, long: TrainConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    never = long.model_copy(update={"checkpoint": long.checkpoint.model_copy(update={"every_steps": None})})
    spoilt(monkeypatch, at_step(2, float("nan")))
    result = trained(tiny_model, records, never, tmp_path)
    assert [(item["kind"], item["action"]) for item in result["decisions"]] == [("nan", "skip")]
    assert result["last_loss"] < result["first_loss"]


def test_without_a_checkpoint_no_number_does_not_go_on_for_ever(
    tiny_model: Path, records: pa.Table, long: TrainConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    never = long.model_copy(update={"checkpoint": long.checkpoint.model_copy(update={"every_steps": None})})
    spoilt(monkeypatch, at_step(5, float("nan"), again=True))
    with pytest.raises(WorkError, match=r"stopped at step 10: .*5 skips .* did not help, and there is no checkpoint"):
        trained(tiny_model, records, never, tmp_path)


def test_what_cannot_be_mended_ends_in_one_line(
    tiny_model: Path, records: pa.Table, long: TrainConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoilt(monkeypatch, at_step(5, float("nan"), again=True))
    with pytest.raises(WorkError, match="training stopped at step") as caught:
        trained(tiny_model, records, long, tmp_path)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_a_kill_after_a_decision_does_not_undo_it(
    tiny_model: Path, records: pa.Table, long: TrainConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bad batch is left out, whether the training was killed later or not."""
    steps, kill_at = 0, -1

    def spoil(loss: Loss, rows: list[int]) -> Loss:
        nonlocal steps
        steps += 1
        if steps == kill_at:
            raise KeyboardInterrupt
        return Loss(loss.sum * float("nan"), loss.count, loss.metrics) if steps == 8 else loss

    with monkeypatch.context() as patch:
        spoilt(patch, spoil)
        whole = trained(tiny_model, records, long, tmp_path / "whole")
        steps, kill_at = 0, 12
        with pytest.raises(KeyboardInterrupt):
            trained(tiny_model, records, long, tmp_path / "parts")
    parts = trained(tiny_model, records, long, tmp_path / "parts")
    assert parts == whole
    for name in ("model.safetensors", "training.json"):
        assert (tmp_path / "parts" / "out" / name).read_bytes() == (tmp_path / "whole" / "out" / name).read_bytes()


def test_a_step_without_a_number_survives_a_kill(
    tiny_model: Path, records: pa.Table, long: TrainConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It stands in the checkpoint, where JSON has no word for it."""
    seldom = long.model_copy(update={"checkpoint": long.checkpoint.model_copy(update={"every_steps": 5})})
    calls = 0

    def spoil(loss: Loss, rows: list[int]) -> Loss:
        nonlocal calls
        calls += 1
        if calls == 8:
            raise KeyboardInterrupt
        return Loss(loss.sum * float("nan"), loss.count, loss.metrics) if calls == 2 else loss

    with monkeypatch.context() as patch:
        spoilt(patch, spoil)
        with pytest.raises(KeyboardInterrupt):
            trained(tiny_model, records, seldom, tmp_path)
    result = trained(tiny_model, records, seldom, tmp_path)
    log = json.loads((tmp_path / "out" / "training.json").read_text())
    assert [step["step"] for step in log if step["loss"] is None] == [1]
    assert result["last_loss"] < result["first_loss"]


@pytest.mark.parametrize(("kept", "from_step"), [(9, 15), (2, 17)])
def test_a_divergence_goes_back_to_before_it_began(
    tiny_model: Path,
    records: pa.Table,
    long: TrainConfig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kept: int,
    from_step: int,
) -> None:
    """It begins at step 15 and is found at step 18; where only two checkpoints are kept, the older one has to do."""
    changes = {
        "watch": MonitorConfig.read(
            {"divergence": {"window": 3, "patience": 3}, "explosion": {"action": "warn"}}, "here"
        ),
        "checkpoint": long.checkpoint.model_copy(update={"keep_last": kept}),
    }
    calls = 0

    def spoil(loss: Loss, rows: list[int]) -> Loss:
        nonlocal calls
        calls += 1
        return Loss(loss.sum + 30 * loss.count, loss.count, loss.metrics) if 16 <= calls < 20 else loss

    spoilt(monkeypatch, spoil)
    result = trained(tiny_model, records, long.model_copy(update=changes), tmp_path)
    decision = next(item for item in result["decisions"] if item["kind"] == "divergence")
    assert (decision["action"], decision["since"], decision["step"]) == ("rollback", 15, 18)
    assert result["steps"] == 30
    assert calls == 30 + 19 - from_step
    course = json.loads((tmp_path / "scratch" / "notes.json").read_text())["course"]
    assert course == {"left_out": [15, 16, 17, 18], "rate_factor": 1.0, "turned_factor": 1.0, "turns": 1}


def test_a_lower_rate_takes_no_step_away(
    tiny_model: Path, records: pa.Table, long: TrainConfig, tmp_path: Path
) -> None:
    slow = MonitorConfig.read({"plateau": {"action": "lower_rate", "window": 10, "improvement": 50.0}}, "here")
    constant = {"watch": slow, "schedule": long.schedule.model_copy(update={"name": "constant", "warmup": 0.0})}
    result = trained(tiny_model, records, long.model_copy(update=constant), tmp_path)
    (first, *_) = (item for item in result["decisions"] if item["kind"] == "plateau")
    log = json.loads((tmp_path / "out" / "training.json").read_text())
    rates = [step["lr"] for step in log]
    assert rates[first["step"]] == 2 * rates[first["step"] + 1]
    assert json.loads((tmp_path / "scratch" / "notes.json").read_text())["course"] == {}
