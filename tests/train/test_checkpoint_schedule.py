"""A training saves a checkpoint by the number of its steps or by the clock."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from posttrain.models.chat import TokenizedExample
from posttrain.train.checkpoint.checkpoints import Checkpoints
from posttrain.train.checkpoint.config import CheckpointConfig
from posttrain.train.config import TrainConfig
from posttrain.train.trainer import Trainer


def test_the_clock_is_the_default() -> None:
    assert (CheckpointConfig().every_seconds, CheckpointConfig().every_steps) == (60, None)


@pytest.mark.parametrize(
    ("every_seconds", "every_steps", "expected"),
    [
        (8, None, [2, 4]),
        (8.1, None, [3]),
        (None, 4, [4]),
        (None, 6, []),
        (8, 3, [2, 3, 5]),  # a checkpoint by the steps starts the clock again
        (None, None, []),
    ],
)
def test_a_checkpoint_is_due_by_time_or_by_steps(
    every_seconds: float | None,
    every_steps: int | None,
    expected: list[int],
    fresh: Callable[..., Any],
    examples: list[TokenizedExample],
    config: TrainConfig,
    tmp_path: Path,
    fit: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Six steps of four seconds; the last needs none, as the result is stored."""
    clock, saved = 100.0, []

    def step(trainer: Trainer, *arguments: Any) -> float | None:
        nonlocal clock
        clock += 4
        return optimizer_step(trainer, *arguments)

    optimizer_step = Trainer.optimizer_step
    monkeypatch.setattr(Trainer, "optimizer_step", step)
    monkeypatch.setattr(time, "monotonic", lambda: clock)
    monkeypatch.setattr(Checkpoints, "save", lambda checkpoints, step, checkpoint: saved.append(step))
    checkpoint = CheckpointConfig(every_seconds=every_seconds, every_steps=every_steps)
    assert len(fit(fresh(), examples, config.model_copy(update={"checkpoint": checkpoint}), 0, tmp_path)) == 6
    assert saved == expected
