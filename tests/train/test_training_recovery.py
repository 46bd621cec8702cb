"""Decisions and kills together: whatever the instant of a kill, the training ends as if there had been none."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from posttrain.models.task import TaskConfig
from posttrain.store.errors import WorkError
from posttrain.train import setup, trainer
from posttrain.train.checkpoint.checkpoints import Checkpoints
from posttrain.train.config import TrainConfig
from posttrain.train.monitor.decisions import Decision
from posttrain.train.monitor.metrics import StepValues
from posttrain.train.recovery import RecoveryLog
from posttrain.train.stage import train
from posttrain.train.trainer import StepResult

pytestmark = pytest.mark.slow

STEPS = 30


class Killed(BaseException):
    """Stands for the death of the process."""


class Lines:
    """A sink that keeps, as a file would, a line a step with its decisions."""

    def __init__(self) -> None:
        self.lines: dict[int, tuple[float, float, list[str]]] = {}

    def write(self, values: StepValues, decisions: Sequence[Decision]) -> None:
        loss = values.loss if math.isfinite(values.loss) else 0.0
        self.lines[values.step] = (loss, values.lr, [item.line() for item in decisions])

    def rewind(self, steps: Sequence[StepValues], told: Mapping[int, Sequence[Decision]]) -> None:
        self.lines = {number: line for number, line in self.lines.items() if number < len(steps)}
        for number, (_, _, said) in self.lines.items():
            assert said == [item.line() for item in told.get(number, ())]

    def close(self) -> None: ...


Run = Callable[..., tuple[dict[str, Any], Lines]]
Spoiled = dict[int, float]


@pytest.fixture
def run(
    tiny_model: Path, records: pa.Table, config: TrainConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Run:
    """``run(name, spoiled, watch, killed=…)``: train; the losses of some steps are said to be others.

    A training that is killed, when a step is met for the first time, is taken up again.
    """
    add_up = trainer.Trainer.accumulate_gradients

    def done(name: str, spoiled: Spoiled, watch: dict[str, Any], killed: int | None = None, **changes: Any) -> Any:
        waiting = {killed}

        def changed(*arguments: Any) -> StepResult:
            step = arguments[1].step
            if step in waiting:
                waiting.clear()
                raise Killed
            result = add_up(*arguments)
            return dataclasses.replace(result, loss=result.loss + spoiled.get(step, 0.0))

        monkeypatch.setattr(trainer.Trainer, "accumulate_gradients", changed)
        saved = {"every_steps": 4, "every_seconds": None, "background": False}
        values = config.model_dump(mode="json") | {"epochs": 10, "watch": watch, "checkpoint": saved} | changes
        lines, folder = Lines(), tmp_path / name

        def attempt() -> dict[str, Any]:
            settings = TrainConfig.read({"micro_batch_tokens": 4096} | values, "here")
            task = TaskConfig(system="Name the intent.")
            places = {"out": folder / "out", "scratch": folder / "scratch"}
            return train(tiny_model, records, settings, task, seed=3, **places, sink=lines)

        try:
            return attempt(), lines
        except Killed:
            return attempt(), lines

    return done


LOWERED = ({}, {"plateau": {"action": "lower_rate", "window": 10, "improvement": 50.0}})
WARNED = (
    {9: math.nan, 13: 60.0},
    {"explosion": {"action": "warn"}, "plateau": {"window": 10, "improvement": 50.0}, "nan": {"action": "skip"}},
)
TURNED = ({9: math.nan, 18: math.nan}, {"nan": {"action": "rollback"}})
DIVERGED = (
    dict.fromkeys(range(15, 19), 30.0),
    {"divergence": {"window": 3, "patience": 3}, "explosion": {"action": "warn"}},
)


@pytest.mark.parametrize("case", [LOWERED, WARNED, TURNED, DIVERGED], ids=["lowered", "warned", "turned", "diverged"])
def test_killed_at_any_step(run: Run, case: tuple[Spoiled, dict[str, Any]]) -> None:
    whole, expected = run("whole", *case)
    assert whole["decisions"]
    assert sorted(expected.lines) == list(range(STEPS))
    for step in (6, 11, 19):
        actual, lines = run(f"killed-{step}", *case, killed=step)
        assert actual["decisions"] == whole["decisions"], step
        assert lines.lines == expected.lines, step


@pytest.mark.parametrize("after", [False, True])
def test_killed_while_going_back(run: Run, monkeypatch: pytest.MonkeyPatch, after: bool) -> None:
    whole, expected = run("whole", *DIVERGED)
    rewind, calls = Checkpoints.rewind, []

    def killed(self: Checkpoints, step: int) -> Any:
        calls.append(step)
        if after:
            rewind(self, step)
        if len(calls) == 1:
            raise Killed
        return rewind(self, step)

    monkeypatch.setattr(Checkpoints, "rewind", killed)
    actual, lines = run("killed", *DIVERGED)
    assert calls == [15, 15], "the second attempt went on with it"
    assert actual["decisions"] == whole["decisions"]
    assert lines.lines == expected.lines


def test_what_a_step_that_is_forgotten_decided_is_told(run: Run) -> None:
    result, lines = run("told", *DIVERGED)
    (rollback,) = (Decision.from_json(item) for item in result["decisions"] if item["action"] == "rollback")
    told = [line for _, _, decisions in lines.lines.values() for line in decisions]
    assert told.count(rollback.line()) == 1


@pytest.mark.parametrize(
    ("case", "action"), [(TURNED, "skip"), (DIVERGED, "lower_rate")], ids=["no number", "divergence"]
)
def test_nothing_to_go_back_to(run: Run, case: tuple[Spoiled, dict[str, Any]], action: str) -> None:
    result, lines = run("without", *case, checkpoint={"every_seconds": None})
    decision = next(item for item in result["decisions"] if item["action"] != "warn")
    assert (decision["action"], decision["why"]) == (action, "there is no checkpoint to start from")
    rates = [lines.lines[step][1] for step in range(STEPS)]
    after = decision["step"] + 1
    lowered = rates[after] < 0.75 * rates[after - 1]
    assert lowered == (action == "lower_rate")


def test_the_best_checkpoint_has_the_lowest_loss(run: Run, tmp_path: Path) -> None:
    spoiled = dict.fromkeys(range(20, STEPS), 50.0)
    off = {"explosion": {"action": "warn"}, "divergence": {"action": "warn"}}
    saved = {"every_steps": 4, "every_seconds": None, "background": False, "keep_best": True, "keep_last": 1}
    run("best", spoiled, off, checkpoint=saved)
    kept = Checkpoints(tmp_path / "best" / "scratch" / "checkpoints")
    assert kept.steps() == [20, 28]


def test_a_loss_that_is_no_number_does_not_decide_which_checkpoint_is_best(run: Run, tmp_path: Path) -> None:
    saved = {"every_steps": 4, "every_seconds": None, "background": False, "keep_best": True, "keep_last": 1}
    run("best", {25: math.nan}, {"nan": {"action": "skip"}}, checkpoint=saved)
    assert Checkpoints(tmp_path / "best" / "scratch" / "checkpoints").steps() == [28]


@pytest.mark.parametrize(
    ("noted", "taken"),
    [
        ({"auto_budget": 4096}, 64),
        ({"auto_budget": 32}, 64),
        ({"fitting_budget": 32}, 32),
        ({"fitting_budget": 128}, 64),
    ],
    ids=["a fork to less", "a fork to more", "memory ran out before", "it held more"],
)
def test_micro_batches_are_no_larger_than_config_and_memory_say(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, noted: dict[str, int], taken: int
) -> None:
    budgets = []
    usual = setup.BatchLoader

    def loader(units: Any, order: Any, budget: int, **options: Any) -> Any:
        budgets.append(budget)
        return usual(units, order, budget, **options)

    monkeypatch.setattr(setup, "BatchLoader", loader)
    (tmp_path / "noted" / "scratch").mkdir(parents=True)
    RecoveryLog(**noted).write(tmp_path / "noted" / "scratch")
    run("noted", {}, {}, micro_batch_tokens=64, epochs=1)
    assert budgets == [taken]


def test_a_stop_is_decided_the_same_again(run: Run) -> None:
    spoiled = dict.fromkeys((9, 10, 11), math.nan)
    said = []
    for _ in range(2):
        with pytest.raises(WorkError, match="stopped at step 11") as caught:
            run("stopped", spoiled, {"nan": {"action": "rollback"}})
        said.append(str(caught.value))
    assert said[0] == said[1]
    assert "lower rate at step 10 did not help" in said[0]


def test_going_back_over_a_lowered_rate_lowers_it_once(run: Run) -> None:
    watch = {"plateau": {"action": "lower_rate", "window": 10, "improvement": 50.0}, "nan": {"action": "rollback"}}
    schedule = {"schedule": {"name": "constant", "warmup": 0.0}}
    _, expected = run("calm", {}, watch, **schedule)
    actual, lines = run("back", {11: math.nan}, watch, **schedule)
    plateaus = [(item["kind"], item["step"]) for item in actual["decisions"] if item["kind"] == "plateau"]
    assert plateaus[0] == plateaus[1], "it is met again"
    assert plateaus[0][1] < 11 < plateaus[2][1]
    assert {step: line[1] for step, line in lines.lines.items() if step < 12} == {
        step: line[1] for step, line in expected.lines.items() if step < 12
    }
