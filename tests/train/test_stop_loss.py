"""``train.stop_loss`` ends a training after the first epoch whose mean loss is low enough."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from posttrain.models.task import TaskConfig
from posttrain.train.config import TrainConfig
from posttrain.train.stage import train

pytestmark = pytest.mark.slow


def test_training_stops_after_an_epoch_below_the_limit_and_resumes_to_the_same_end(
    tiny_model: Path, records: pa.Table, checkpointed: TrainConfig, tmp_path: Path
) -> None:
    def run(name: str, **changes: Any) -> dict[str, Any]:
        settings = TrainConfig.read(
            checkpointed.model_dump() | {"epochs": 4, "micro_batch_tokens": 4096} | changes, "here"
        )
        folders = {"out": tmp_path / name, "scratch": tmp_path / f"{name}-scratch"}
        return train(tiny_model, records, settings, TaskConfig(), seed=3, **folders)

    def steps(name: str) -> list[dict[str, Any]]:
        result: list[dict[str, Any]] = json.loads((tmp_path / name / "training.json").read_text())
        return result

    run("whole")
    epochs = [[step for step in steps("whole") if step["epoch"] == epoch] for epoch in range(4)]
    losses = [
        sum(step["loss"] * step["loss_count"] for step in epoch) / sum(step["loss_count"] for step in epoch)
        for epoch in epochs
    ]
    assert losses == sorted(losses, reverse=True)
    limit = (losses[0] + losses[1]) / 2
    short = run("short", stop_loss=limit)
    assert short["steps"] == len(epochs[0]) + len(epochs[1])
    assert steps("short") == steps("whole")[: short["steps"]]
    assert short["last_loss"] == pytest.approx(losses[1])
    # Its checkpoint of the last step is where a killed training would resume from: nothing is left to do.
    again = run("short", stop_loss=limit)
    assert again == short
    assert run("never", stop_loss=losses[3] / 2)["steps"] == len(steps("whole"))
