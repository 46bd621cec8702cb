"""The line of a training's progress says the latest loss."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from posttrain.models.chat import TokenizedExample
from posttrain.train.config import TrainConfig


def test_every_step_says_its_loss(
    fresh: Callable[..., Any],
    examples: list[TokenizedExample],
    config: TrainConfig,
    tmp_path: Path,
    fit: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said: list[tuple[int, str]] = []

    @contextmanager
    def task(*_: Any) -> Iterator[Callable[..., None]]:
        yield lambda count, note="": said.append((count, note))

    monkeypatch.setattr("posttrain.train.trainer.progress_bar", task)
    steps = fit(fresh(), examples, config, 0, tmp_path)
    assert said == [(0, ""), *((1, f"loss {step.loss:.4g}") for step in steps)]
