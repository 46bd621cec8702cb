"""The progress bar of a training shows the latest loss."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from posttrain.models.chat import TokenizedExample
from posttrain.train.config import TrainConfig


def test_the_progress_bar_shows_the_loss_of_each_step(
    fresh: Callable[..., Any],
    examples: list[TokenizedExample],
    config: TrainConfig,
    tmp_path: Path,
    fit: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    updates: list[tuple[int, str]] = []

    @contextmanager
    def record_updates(*_: Any) -> Iterator[Callable[..., None]]:
        yield lambda count, note="": updates.append((count, note))

    monkeypatch.setattr("posttrain.train.trainer.progress_bar", record_updates)
    steps = fit(fresh(), examples, config, 0, tmp_path)
    assert updates == [(0, ""), *((1, f"loss {step.loss:.4g}") for step in steps)]
