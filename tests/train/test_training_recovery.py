"""Decisions and kills together: a kill at any time does not change the outcome of a training."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from posttrain.models.task import TaskConfig
from posttrain.store.errors import WorkError
from posttrain.train import setup, trainer
from posttrain.train.checkpoint.checkpoints import Checkpoints
from posttrain.train.config import TrainConfig
from posttrain.train.monitor.decisions import POLICIES, MonitorDecision
from posttrain.train.monitor.detectors import LossDivergence, Plateau
from posttrain.train.monitor.metrics import StepValues
from posttrain.train.recovery import RecoveryLog
from posttrain.train.stage import train
from posttrain.train.trainer import StepResult

pytestmark = pytest.mark.slow

STEPS = 24


class Killed(BaseException):
    """Stands for the death of the process."""


class LineSink:
    """A sink that keeps a line for each step with its decisions, as a file would."""

    def __init__(self) -> None:
        self.lines: dict[int, tuple[float, float, list[str]]] = {}

    def write(self, values: StepValues, decisions: Sequence[MonitorDecision]) -> None:
        loss = values.loss if math.isfinite(values.loss) else 0.0
        self.lines[values.step] = (loss, values.lr, [item.line() for item in decisions])

    def rewind(self, steps: Sequence[StepValues], reported: Mapping[int, Sequence[MonitorDecision]]) -> None:
        self.lines = {number: line for number, line in self.lines.items() if number < len(steps)}
        for number, (_, _, decision_lines) in self.lines.items():
            assert decision_lines == [item.line() for item in reported.get(number, ())]

    def close(self) -> None: ...


Run = Callable[..., tuple[dict[str, Any], LineSink]]
LossOffsets = dict[int, float]


@pytest.fixture
def run(
    tiny_model: Path, records: pa.Table, config: TrainConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Run:
    """``run(name, loss_offsets, watch, kill_at=…)``: trains; offsets are added to the losses of some steps.

    ``watch`` has the actions that differ from the normal ones, and constants by detector. A training that is killed, at
    the first attempt of each of these steps, is resumed.
    """
    original = trainer.Trainer.accumulate_gradients

    def train_with_faults(
        name: str,
        loss_offsets: LossOffsets,
        watch: dict[Any, dict[str, Any]],
        kill_at: Sequence[int] = (),
        **changes: Any,
    ) -> Any:
        steps_to_kill = set(kill_at)

        def accumulate(*arguments: Any) -> StepResult:
            step = arguments[1].step
            if step in steps_to_kill:
                steps_to_kill.remove(step)
                raise Killed
            result = original(*arguments)
            return dataclasses.replace(result, loss=result.loss + loss_offsets.get(step, 0.0))

        monkeypatch.setattr(trainer.Trainer, "accumulate_gradients", accumulate)
        monkeypatch.setitem(POLICIES, "normal", POLICIES["normal"] | watch.get("actions", {}))
        for detector, limits in watch.items():
            for limit, value in limits.items() if detector != "actions" else ():
                monkeypatch.setattr(detector, limit, value)
        checkpoint = {"every_steps": 4, "every_seconds": None, "background": False}
        values = config.model_dump(mode="json") | {"epochs": 8, "checkpoint": checkpoint} | changes
        lines, folder = LineSink(), tmp_path / name

        def attempt() -> dict[str, Any]:
            settings = TrainConfig.read({"micro_batch_tokens": 4096} | values, "here")
            task = TaskConfig(system="Name the intent.")
            folders = {"out": folder / "out", "scratch": folder / "scratch"}
            return train(tiny_model, records, settings, task, seed=3, **folders, sink=lines)

        while True:
            with suppress(Killed):
                return attempt(), lines

    return train_with_faults


NO_IMPROVEMENT = {"WINDOW": 10, "IMPROVEMENT": 50.0}
LOWERED_RATE = ({9: math.nan}, {"actions": {"plateau": "lower_rate", "nan": "skip"}, Plateau: NO_IMPROVEMENT})
ROLLBACK = ({9: math.nan, 18: math.nan}, {Plateau: NO_IMPROVEMENT})
DIVERGENCE = (
    dict.fromkeys(range(15, 19), 30.0),
    {"actions": {"explosion": "warn"}, LossDivergence: {"WINDOW": 3, "PATIENCE": 3}},
)


@pytest.mark.parametrize(
    ("case", "actions"),
    [
        (LOWERED_RATE, {"skip", "lower_rate"}),
        (ROLLBACK, {"rollback", "warn"}),
        (DIVERGENCE, {"rollback"}),
    ],
    ids=["lower rate", "rollback", "divergence"],
)
def test_kills_do_not_change_the_outcome(run: Run, case: tuple[LossOffsets, dict[Any, Any]], actions: set[str]) -> None:
    expected_summary, expected = run("whole", *case)
    assert {item["action"] for item in expected_summary["decisions"]} >= actions
    assert sorted(expected.lines) == list(range(STEPS))
    summary, lines = run("killed", *case, kill_at=(6, 11, 19))
    assert summary["decisions"] == expected_summary["decisions"]
    assert lines.lines == expected.lines


def test_a_kill_during_a_rollback_does_not_change_the_outcome(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    expected_summary, expected = run("whole", *DIVERGENCE)
    (rollback,) = (
        MonitorDecision.from_json(item) for item in expected_summary["decisions"] if item["action"] == "rollback"
    )
    reported = [line for _, _, decisions in expected.lines.values() for line in decisions]
    assert reported.count(rollback.line()) == 1, "although its step is dropped"
    rewind, calls = Checkpoints.rewind, []

    def rewind_or_die(self: Checkpoints, step: int) -> Any:
        calls.append(step)
        if len(calls) == 2:
            rewind(self, step)
        if len(calls) <= 2:
            raise Killed
        return rewind(self, step)

    monkeypatch.setattr(Checkpoints, "rewind", rewind_or_die)
    summary, lines = run("killed", *DIVERGENCE)
    assert calls == [15, 15, 15], "killed before it and after it; the third attempt completes the rollback"
    assert summary["decisions"] == expected_summary["decisions"]
    assert lines.lines == expected.lines


@pytest.mark.parametrize(
    ("case", "action"), [(ROLLBACK, "skip"), (DIVERGENCE, "lower_rate")], ids=["no number", "divergence"]
)
def test_without_a_checkpoint_there_is_no_rollback(
    run: Run, case: tuple[LossOffsets, dict[Any, Any]], action: str
) -> None:
    result, lines = run("without", *case, checkpoint={"every_seconds": None})
    decision = next(item for item in result["decisions"] if item["action"] != "warn")
    assert (decision["action"], decision["why"]) == (action, "there is no checkpoint to start from")
    rates = [lines.lines[step][1] for step in range(STEPS)]
    after = decision["step"] + 1
    lowered = rates[after] < 0.75 * rates[after - 1]
    assert lowered == (action == "lower_rate")


@pytest.mark.parametrize(
    ("logged", "expected"),
    [
        ({"auto_budget": 4096}, 64),
        ({"auto_budget": 32}, 64),
        ({"fitting_budget": 32}, 32),
        ({"fitting_budget": 128}, 64),
    ],
    ids=["fork to less", "fork to more", "out of memory before", "more fitted before"],
)
def test_the_micro_batch_fits_the_config_and_the_memory(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, logged: dict[str, int], expected: int
) -> None:
    budgets = []
    original = setup.BatchLoader

    def build_loader(units: Any, sampler: Any, budget: int, **options: Any) -> Any:
        budgets.append(budget)
        return original(units, sampler, budget, **options)

    monkeypatch.setattr(setup, "BatchLoader", build_loader)
    (tmp_path / "logged" / "scratch").mkdir(parents=True)
    RecoveryLog(**logged).write(tmp_path / "logged" / "scratch")
    run("logged", {}, {}, micro_batch_tokens=64, epochs=1)
    assert budgets == [expected]


def test_a_resumed_training_stops_with_the_same_error(run: Run) -> None:
    loss_offsets = dict.fromkeys((9, 10, 11), math.nan)
    messages = []
    for _ in range(2):
        with pytest.raises(WorkError, match="stopped at step 11") as caught:
            run("stopped", loss_offsets, {})
        messages.append(str(caught.value))
    assert messages[0] == messages[1]
    assert "lower rate at step 10 did not help" in messages[0]


def test_a_rollback_past_a_lowered_rate_lowers_it_once(run: Run) -> None:
    monitor = {"actions": {"plateau": "lower_rate"}, Plateau: NO_IMPROVEMENT}
    schedule = {"schedule": {"name": "constant", "warmup": 0.0}}
    _, expected = run("calm", {}, monitor, **schedule)
    actual, lines = run("back", {11: math.nan}, monitor, **schedule)
    plateaus = [(item["kind"], item["step"]) for item in actual["decisions"] if item["kind"] == "plateau"]
    assert plateaus[0] == plateaus[1], "the plateau is detected again"
    assert plateaus[0][1] < 11 < plateaus[2][1]
    assert {step: line[1] for step, line in lines.lines.items() if step < 12} == {
        step: line[1] for step, line in expected.lines.items() if step < 12
    }
