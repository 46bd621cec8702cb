"""What the watch decides reaches every sink, whatever it does to the step it was decided at."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from posttrain.models.task import TaskConfig
from posttrain.train import trainer
from posttrain.train.config import TrainConfig
from posttrain.train.monitor.decisions import Decision
from posttrain.train.monitor.metrics import StepValues
from posttrain.train.stage import train
from posttrain.train.trainer import StepResult


class Told:
    """A sink that remembers the lines it would have, and every decision."""

    def __init__(self) -> None:
        self.lines: dict[int, StepValues] = {}
        self.decisions: list[tuple[str, int, str]] = []

    def write(self, values: StepValues, decisions: Sequence[Decision]) -> None:
        self.lines[values.step] = values
        self.decisions += [(item.finding.kind, item.finding.step, item.action) for item in decisions]

    def rewind(self, steps: Sequence[StepValues], told: Mapping[int, Sequence[Decision]]) -> None:
        self.lines = {number: values for number, values in self.lines.items() if number < len(steps)}

    def close(self) -> None:
        pass


@pytest.fixture
def spoilt(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, float], None]:
    """``spoilt(step, factor)``: the loss of a step is multiplied, once."""

    def plant(step: int, factor: float) -> None:
        usual, calls = trainer.Trainer.accumulate_gradients, 0

        def add_up(*arguments: Any) -> StepResult:
            nonlocal calls
            calls += 1
            result = usual(*arguments)
            return dataclasses.replace(result, loss=result.loss * factor) if calls == step + 1 else result

        monkeypatch.setattr(trainer.Trainer, "accumulate_gradients", add_up)

    return plant


@pytest.mark.parametrize("action", ["rollback", "skip"])
def test_each_decision_is_told_once(
    tiny_model: Path,
    records: pa.Table,
    config: TrainConfig,
    tmp_path: Path,
    spoilt: Callable[[int, float], None],
    action: str,
) -> None:
    spoilt(3, float("nan"))
    values = config.model_dump(mode="json") | {"watch": {"nan": {"action": action}}, "micro_batch_tokens": 4096}
    sink = Told()
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
