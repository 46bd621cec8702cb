"""A finished training is trained on for more epochs where that is what the longer training would have been."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from posttrain.store.errors import UserError
from posttrain.train import standalone
from posttrain.train.callbacks import CallbackList, TrainingStopped
from posttrain.train.config import TrainConfig
from posttrain.train.evaluation import HeldOut
from posttrain.train.monitor.metrics import read_steps
from posttrain.train.standalone import TrainJobConfig, train_standalone

pytestmark = pytest.mark.slow

CONSTANT = {"schedule": {"name": "constant", "warmup": 2}}


class Killed(BaseException):
    """Stands for the death of the process."""


@pytest.fixture
def run(tiny_model: Path, records: pa.Table, checkpointed: TrainConfig, tmp_path: Path) -> Any:
    """``run(name, **settings)``: trains into ``tmp_path / name``, or trains on there."""

    def call(name: str, *callbacks: Any, **changes: Any) -> dict[str, Any]:
        train = TrainConfig.read({**checkpointed.model_dump(), "micro_batch_tokens": 4096, **changes}, "here")
        config = TrainJobConfig(model="tiny", data="a.jsonl", train=train)
        options = {"callbacks": CallbackList(callbacks), "extendable": True}
        return train_standalone(tmp_path / name, config, records, tiny_model, **options)

    return call


def outcome(folder: Path) -> tuple[bytes, bytes, list[float]]:
    losses = [step["loss"] for step in read_steps(folder / "metrics.jsonl")]
    return (folder / "model.safetensors").read_bytes(), (folder / "training.json").read_bytes(), losses


@pytest.mark.parametrize("lora", [False, True])
def test_more_epochs_end_as_if_asked_for_from_the_start(lora: bool, run: Any, tmp_path: Path) -> None:
    settings = CONSTANT | ({"method": "lora"} if lora else {})
    run("whole", **settings, epochs=3)
    run("grown", **settings, epochs=1)
    assert run("grown", **settings, epochs=1)["steps"] == 3, "it is done"
    with pytest.raises(TrainingStopped):
        run("grown", lambda step: step.step == 4, **settings, epochs=2)
    assert run("grown", **settings, epochs=3)["steps"] == 9
    assert outcome(tmp_path / "whole") == outcome(tmp_path / "grown")


def test_a_kill_before_the_longer_training_begins_leaves_it_to_be_repeated(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run("whole", **CONSTANT, max_steps=4)
    run("grown", **CONSTANT, max_steps=2)

    def die(path: Path, content: bytes) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(standalone, "write_atomically", die)
        with pytest.raises(Killed):
            run("grown", **CONSTANT, max_steps=4)
    assert run("grown", **CONSTANT, max_steps=4)["steps"] == 4
    assert outcome(tmp_path / "whole") == outcome(tmp_path / "grown")


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        ({"epochs": 1}, {"epochs": 2}, "`train.epochs` was 1 and is 2; name another --out; only a constant schedule"),
        ({**CONSTANT, "epochs": 1}, {**CONSTANT, "epochs": 2, "clip": 0.5}, "began with other settings"),
        ({**CONSTANT, "epochs": 2}, {**CONSTANT, "epochs": 1}, "`train.epochs` was 2 and is 1"),
        ({**CONSTANT, "epochs": 1}, {**CONSTANT, "max_steps": 9}, "`train.max_steps` was null and is 9"),
    ],
)
def test_a_training_that_would_be_another_is_refused(
    first: dict[str, Any], second: dict[str, Any], message: str, run: Any, tmp_path: Path
) -> None:
    run("out", **first)
    before = outcome(tmp_path / "out")
    with pytest.raises(UserError, match=message):
        run("out", **second)
    assert outcome(tmp_path / "out") == before
    assert (tmp_path / "out" / "summary.json").is_file()


def test_a_training_without_its_checkpoints_is_not_trained_on(run: Any, tmp_path: Path) -> None:
    run("out", **CONSTANT, epochs=1, checkpoint={"every_seconds": None})
    with pytest.raises(UserError, match="no checkpoint is left to train on from"):
        run("out", **CONSTANT, epochs=2)


@pytest.mark.parametrize(
    ("changes", "extendable"),
    [
        ({}, True),
        ({"schedule": {"name": "constant", "warmup": 0}}, True),
        ({"schedule": {"name": "constant", "warmup": 0.1}}, False),
        *(({"schedule": {"name": name, "warmup": 0}}, False) for name in ("linear", "cosine", "wsd")),
        ({"phases": [{"steps": 3}]}, False),
        ({"method": "lora"}, True),
        ({"method": "lora", "lora": {"gates": 0.5}}, False),
    ],
)
def test_only_steps_that_do_not_depend_on_their_number_are_trained_on(
    changes: dict[str, Any], extendable: bool
) -> None:
    assert TrainConfig.read({**CONSTANT, **changes}, "here").is_extendable is extendable


def test_a_training_with_other_held_out_records_is_another(
    tiny_model: Path, records: pa.Table, config: TrainConfig, tmp_path: Path
) -> None:
    settings = {**config.model_dump(), "micro_batch_tokens": 4096, "max_steps": 1, "evaluate": {"data": "b.jsonl"}}
    job = TrainJobConfig(model="tiny", data="a.jsonl", train=TrainConfig.read(settings, "here"))
    first, second = (HeldOut(records.slice(start, 2)) for start in (0, 2))
    for _ in range(2):
        train_standalone(tmp_path / "out", job, records, tiny_model, held_out=first)
    with pytest.raises(UserError, match="held-out data"):
        train_standalone(tmp_path / "out", job, records, tiny_model, held_out=second)
