"""Callbacks of a training: what they are called with, how they stop it, and what their failure leaves."""

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import posttrain
from posttrain.store.errors import UserError, WorkError

pytestmark = pytest.mark.slow

ROWS = [{"prompt": f"message {number}", "completion": "yes" if number % 2 else "no"} for number in range(8)]
SETTINGS = {"train": {"epochs": 2, "batch_size": 2, "checkpoint": {"every_steps": 3, "every_seconds": None}}}
STEPS = 8


def train(out: Path, *callbacks: Any) -> posttrain.TrainResult:
    return posttrain.train("tiny", ROWS, out, settings=SETTINGS, callbacks=callbacks)


def weights(out: Path) -> str:
    return hashlib.sha256((out / "model.safetensors").read_bytes()).hexdigest()


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The weights of a training without callbacks."""
    out = tmp_path_factory.mktemp("expected") / "out"
    train(out)
    return weights(out)


class Recorder(posttrain.Callback):
    """Keeps all calls."""

    def __init__(self, stop_after: int | None = None) -> None:
        self.calls: list[tuple[str, Any]] = []
        self.stop_after = stop_after

    def on_step(self, step: posttrain.StepValues) -> bool | None:
        self.calls.append(("step", step.step))
        return None if self.stop_after is None else step.step + 1 == self.stop_after

    def on_save(self, steps: int) -> None:
        self.calls.append(("save", steps))

    def on_end(self, result: posttrain.TrainResult) -> None:
        self.calls.append(("end", result))


def test_they_are_called_after_each_step_at_checkpoints_and_at_the_end(tmp_path: Path, expected: str) -> None:
    recorder, losses = Recorder(), []
    result = train(tmp_path / "out", recorder, lambda step: losses.append(step.loss))
    # A checkpoint belongs to its step, and is saved before the callbacks hear of the step.
    calls = [("step", 0), ("step", 1), ("save", 3), ("step", 2), ("step", 3), ("step", 4), ("save", 6), ("step", 5)]
    assert recorder.calls == [*calls, ("step", 6), ("step", 7), ("end", result)]
    assert losses == [line["loss"] for line in result.metrics]
    assert weights(tmp_path / "out") == expected


def test_a_stopped_training_saves_and_resumes_to_the_same_weights(tmp_path: Path, expected: str) -> None:
    stop_after = 4  # a step after a checkpoint
    out, first, second = tmp_path / "out", Recorder(stop_after), Recorder()
    result = train(out, first)
    assert (result.steps, result.finished) == (stop_after, False)
    assert repr(result).endswith(", stopped)")
    assert first.calls[-1] == ("end", result)
    assert len(result.metrics) == stop_after
    with pytest.raises(UserError, match="the training was stopped; call train again: it resumes"):
        result.load()
    assert train(out, second).finished
    # No step is done, or reported, twice.
    assert [step for name, step in second.calls if name == "step"] == list(range(stop_after, STEPS))
    assert weights(out) == expected


class Measurer(posttrain.Callback):
    """Stops at a step, or before it where it is done already, and measures the model."""

    def __init__(self, goal: int) -> None:
        self.goal, self.begun, self.norm = goal, (-1, -1), 0.0

    def on_begin(self, steps: int, total: int) -> bool:
        self.begun = (steps, total)
        return steps >= self.goal

    def on_step(self, step: posttrain.StepValues) -> bool:
        return step.step + 1 >= self.goal

    def on_stop(self, model: Any) -> None:
        assert not model.model.training
        self.norm = sum(float(weight.float().square().sum()) for weight in model.model.state_dict().values())


def test_a_stopped_training_shows_its_model(tmp_path: Path) -> None:
    settings = {"train": {**SETTINGS["train"], "method": "lora"}}

    def run(*callbacks: Any) -> posttrain.TrainResult:
        return posttrain.train("tiny", ROWS, tmp_path / "out", settings=settings, callbacks=callbacks)

    first, again, later = Measurer(5), Measurer(5), Measurer(7)
    assert run(first).steps == 5
    assert first.begun == (0, STEPS)
    # The goal is reached already: no step is done, and the model is the same to the last bit.
    assert run(again).steps == 5
    assert again.begun == (5, STEPS)
    assert again.norm == first.norm
    assert run(later).steps == 7
    assert later.norm != first.norm
    assert run().finished
    whole = posttrain.train("tiny", ROWS, tmp_path / "whole", settings=settings)
    assert weights(whole.folder) == weights(tmp_path / "out")


def test_numpys_true_stops(tmp_path: Path) -> None:
    assert train(tmp_path / "out", lambda step: np.True_).steps == 1


def test_any_other_value_goes_on(tmp_path: Path) -> None:
    answers = [False, None, 1, "stop", [0], {}, 2.0, object()]
    assert train(tmp_path / "out", lambda step: answers[step.step]).finished


def test_stopping_at_the_last_step_ends_the_training(tmp_path: Path, expected: str) -> None:
    assert train(tmp_path / "out", Recorder(STEPS)).finished
    assert weights(tmp_path / "out") == expected


@pytest.mark.parametrize("event", ["on_step", "on_save"])
def test_a_failing_callback_ends_the_training_with_a_valid_checkpoint(
    tmp_path: Path, expected: str, event: str
) -> None:
    class Faulty:
        pass

    def fail(value: Any) -> None:
        if event == "on_save" or value.step == 4:
            raise ValueError("no space\nin the tracker")

    setattr(Faulty, event, staticmethod(fail))
    with pytest.raises(WorkError) as caught:
        train(tmp_path / "out", Recorder(), Faulty())
    when = "at step 4" if event == "on_step" else "at the checkpoint after 3 steps"
    assert str(caught.value) == f"callbacks[1] (Faulty) failed {when}: ValueError: no space"
    assert isinstance(caught.value.__cause__, ValueError)
    recorder = Recorder()
    train(tmp_path / "out", recorder)
    steps = [step for name, step in recorder.calls if name == "step"]
    assert steps == list(range(5 if event == "on_step" else 3, STEPS))
    assert weights(tmp_path / "out") == expected


def test_a_failure_at_the_end_leaves_the_model(tmp_path: Path, expected: str) -> None:
    class Faulty:
        def on_end(self, result: posttrain.TrainResult) -> None:
            raise OSError("no reply")

    with pytest.raises(WorkError, match=r"^callbacks\[0\] \(Faulty\) failed at the end: OSError: no reply$"):
        train(tmp_path / "out", Faulty())
    assert weights(tmp_path / "out") == expected


def test_a_callback_of_transformers_is_refused_before_the_training(tmp_path: Path) -> None:
    from transformers import TrainerCallback

    with pytest.raises(UserError, match="TrainerCallback is a callback of transformers' Trainer"):
        train(tmp_path / "out", TrainerCallback())
    assert not (tmp_path / "out").exists() or not list((tmp_path / "out").glob("*.safetensors"))
