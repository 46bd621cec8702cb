"""What goes wrong while training, planted: the training survives on its own and says what it did."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from posttrain.models.language_model import LanguageModel
from posttrain.models.packing import Packed
from posttrain.models.task import TaskConfig
from posttrain.store.errors import WorkError
from posttrain.train.config import TrainConfig
from posttrain.train.lesson import Lesson
from posttrain.train.objectives.loss import Loss
from posttrain.train.stage import train
from posttrain.train.watch.config import WatchConfig

TASK = TaskConfig(system="Name the intent.")
Spoil = Callable[[Loss, list[int]], Loss]


@pytest.fixture
def long(config: TrainConfig) -> TrainConfig:
    return config.model_copy(update={"epochs": 10, "learning_rate": 1e-3})


def spoilt(monkeypatch: pytest.MonkeyPatch, spoil: Spoil) -> None:
    loss = Lesson.loss

    def changed(self: Lesson, lm: LanguageModel, packed: Packed, rows: list[int]) -> Loss:
        return spoil(loss(self, lm, packed, rows), list(rows))

    monkeypatch.setattr(Lesson, "loss", changed)


def at_step(number: int, factor: float, again: bool = False) -> Spoil:
    """Multiply the loss of the ``number``-th micro-batch (one a step here) by a factor, or of all from there on."""
    calls = 0

    def spoil(loss: Loss, rows: list[int]) -> Loss:
        nonlocal calls
        calls += 1
        hit = calls > number if again else calls == number + 1
        return Loss(loss.sum * factor, loss.count, loss.metrics) if hit else loss

    return spoil


def trained(source: Path, records: pa.Table, config: TrainConfig, folder: Path) -> dict[str, Any]:
    return train(source, records, config, TASK, seed=3, out=folder / "out", scratch=folder / "scratch")


@pytest.mark.parametrize(("factor", "kind"), [(float("nan"), "nan"), (float("inf"), "nan"), (100.0, "explosion")])
def test_one_bad_batch(
    tiny_model: Path,
    records: pa.Table,
    long: TrainConfig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    factor: float,
    kind: str,
) -> None:
    clean = trained(tiny_model, records, long, tmp_path / "clean")
    assert clean["decisions"] == []
    spoilt(monkeypatch, at_step(12, factor))
    found = trained(tiny_model, records, long, tmp_path / "spoilt")
    assert [(one["kind"], one["step"]) for one in found["decisions"]] == [(kind, 12)]
    assert found["steps"] == clean["steps"]
    assert found["last_loss"] == pytest.approx(clean["last_loss"], rel=0.1)


def test_without_a_checkpoint_the_gradient_is_left_out(
    tiny_model: Path, records: pa.Table, long: TrainConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    never = long.model_copy(update={"checkpoint": long.checkpoint.model_copy(update={"every_steps": None})})
    spoilt(monkeypatch, at_step(2, float("nan")))
    found = trained(tiny_model, records, never, tmp_path)
    assert [(one["kind"], one["action"]) for one in found["decisions"]] == [("nan", "rollback")]
    assert found["last_loss"] < found["first_loss"]


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
    found = trained(tiny_model, records, seldom, tmp_path)
    log = json.loads((tmp_path / "out" / "training.json").read_text())
    assert [step["step"] for step in log if step["loss"] is None] == [1]
    assert found["last_loss"] < found["first_loss"]


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
        "watch": WatchConfig.read(
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
    found = trained(tiny_model, records, long.model_copy(update=changes), tmp_path)
    decision = next(one for one in found["decisions"] if one["kind"] == "divergence")
    assert (decision["action"], decision["since"], decision["step"]) == ("rollback", 15, 18)
    assert found["steps"] == 30
    assert calls == 30 + 19 - from_step
    left_out = json.loads((tmp_path / "scratch" / "left_out.json").read_text())
    assert left_out["steps"] == [15, 16, 17, 18]


def test_a_lower_rate_takes_no_step_away(
    tiny_model: Path, records: pa.Table, long: TrainConfig, tmp_path: Path
) -> None:
    slow = WatchConfig.read({"plateau": {"action": "lower_rate", "window": 10, "improvement": 50.0}}, "here")
    constant = {"watch": slow, "schedule": long.schedule.model_copy(update={"name": "constant", "warmup": 0.0})}
    found = trained(tiny_model, records, long.model_copy(update=constant), tmp_path)
    (first, *_) = (one for one in found["decisions"] if one["kind"] == "plateau")
    log = json.loads((tmp_path / "out" / "training.json").read_text())
    rates = [step["lr"] for step in log]
    assert rates[first["step"]] == 2 * rates[first["step"] + 1]
    left_out = json.loads((tmp_path / "scratch" / "left_out.json").read_text())
    assert left_out["steps"] == []
