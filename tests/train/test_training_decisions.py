"""Decisions of the monitor reach every sink, whatever they do to their step."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from posttrain.models.task import TaskConfig
from posttrain.train import trainer
from posttrain.train.config import TrainConfig
from posttrain.train.monitor.decisions import POLICIES, Action, MonitorDecision
from posttrain.train.monitor.metrics import StepValues
from posttrain.train.stage import train
from posttrain.train.trainer import StepResult


class DecisionSink:
    """A sink that records its current steps, and every decision."""

    def __init__(self) -> None:
        self.lines: dict[int, StepValues] = {}
        self.decisions: list[tuple[str, int, str]] = []

    def write(self, values: StepValues, decisions: Sequence[MonitorDecision]) -> None:
        self.lines[values.step] = values
        self.decisions += [(item.finding.kind, item.finding.step, item.action) for item in decisions]

    def rewind(self, steps: Sequence[StepValues], reported: Mapping[int, Sequence[MonitorDecision]]) -> None:
        self.lines = {number: values for number, values in self.lines.items() if number < len(steps)}

    def close(self) -> None:
        pass


@pytest.fixture
def spoil_loss(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, float], None]:
    """``spoil_loss(step, factor)``: multiplies the loss of a step, once."""

    def plant(step: int, factor: float) -> None:
        original, calls = trainer.Trainer.accumulate_gradients, 0

        def add_up(*arguments: Any) -> StepResult:
            nonlocal calls
            calls += 1
            result = original(*arguments)
            return dataclasses.replace(result, loss=result.loss * factor) if calls == step + 1 else result

        monkeypatch.setattr(trainer.Trainer, "accumulate_gradients", add_up)

    return plant


@pytest.mark.parametrize("action", ["rollback", "skip"])
def test_each_decision_is_reported_once(
    tiny_model: Path,
    records: pa.Table,
    checkpointed: TrainConfig,
    tmp_path: Path,
    spoil_loss: Callable[[int, float], None],
    action: Action,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spoil_loss(3, float("nan"))
    monkeypatch.setitem(POLICIES, "normal", POLICIES["normal"] | {"nan": action})
    values = checkpointed.model_dump(mode="json") | {"micro_batch_tokens": 4096}
    sink = DecisionSink()
    result = train(
        tiny_model,
        records,
        TrainConfig.read(values, "here"),
        TaskConfig(),
        seed=3,
        out=tmp_path / "out",
        scratch=tmp_path / "scratch",
        sink=sink,
    )
    assert sink.decisions == [("nan", 3, action)]
    assert [(item["kind"], item["step"], item["action"]) for item in result["decisions"]] == sink.decisions
    assert sorted(sink.lines) == list(range(6))
