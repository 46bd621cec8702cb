"""A signal during a training: the step is finished and saved, and the same command resumes from it."""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from posttrain.models.chat import TokenizedExample
from posttrain.models.language_model import LanguageModel
from posttrain.train import trainer
from posttrain.train.callbacks import CallbackList
from posttrain.train.checkpoint.checkpoints import Checkpoints
from posttrain.train.checkpoint.config import CheckpointConfig
from posttrain.train.config import TrainConfig
from posttrain.train.objectives.sft import SftObjective

Fresh = Callable[..., LanguageModel]
Fit = Callable[..., list[Any]]


@pytest.fixture
def send_signal(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """``send_signal(step, signal)``: the process gets the signal in the middle of that step."""
    original = trainer.Trainer.accumulate_gradients

    def send(step: int, *numbers: signal.Signals) -> None:
        def accumulate(*arguments: Any) -> Any:
            result = original(*arguments)
            if arguments[1].step == step:
                for number in numbers:
                    os.kill(os.getpid(), number)
            return result

        monkeypatch.setattr(trainer.Trainer, "accumulate_gradients", accumulate)

    return send


@pytest.mark.parametrize(
    ("number", "ending"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)], ids=["ctrl-c", "SIGTERM"]
)
@pytest.mark.parametrize("step", [2, 5], ids=["a step", "the last step"])
def test_a_signal_finishes_and_saves_the_step(
    fresh: Fresh,
    examples: list[TokenizedExample],
    config: TrainConfig,
    tmp_path: Path,
    fit: Fit,
    send_signal: Callable[..., None],
    number: signal.Signals,
    ending: type[BaseException],
    step: int,
) -> None:
    config = config.model_copy(update={"checkpoint": CheckpointConfig(every_seconds=1000.0)})
    handler = signal.getsignal(number)
    expected = [step.loss for step in fit(fresh(), examples, config, 0, tmp_path / "whole")]
    send_signal(step, number)
    with pytest.raises(ending) as caught:
        fit(fresh(), examples, config, 0, tmp_path / "interrupted")
    assert ending is KeyboardInterrupt or caught.value.args == (143,)
    assert signal.getsignal(number) is handler
    assert Checkpoints(tmp_path / "interrupted" / "checkpoints").steps() == [step + 1]
    assert [step.loss for step in fit(fresh(), examples, config, 0, tmp_path / "interrupted")] == expected


def test_a_second_signal_stops_at_once(
    fresh: Fresh,
    examples: list[TokenizedExample],
    config: TrainConfig,
    tmp_path: Path,
    fit: Fit,
    send_signal: Callable[..., None],
) -> None:
    config = config.model_copy(update={"checkpoint": CheckpointConfig(every_seconds=1000.0)})
    send_signal(2, signal.SIGINT, signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        fit(fresh(), examples, config, 0, tmp_path)
    assert not Checkpoints(tmp_path / "checkpoints").steps()


def test_a_signal_comes_before_the_stop_of_a_callback(
    fresh: Fresh,
    examples: list[TokenizedExample],
    config: TrainConfig,
    tmp_path: Path,
    send_signal: Callable[..., None],
) -> None:
    send_signal(2, signal.SIGTERM)
    checkpoint = CheckpointConfig(every_seconds=1000.0)
    config = config.model_copy(update={"micro_batch_tokens": 4096, "checkpoint": checkpoint})
    objective = SftObjective([[example] for example in examples], config)
    stop = CallbackList(lambda step: step.step == 2)
    with pytest.raises(SystemExit):
        trainer.Trainer(fresh(), objective, config, 0, tmp_path, callbacks=stop).train()
    assert Checkpoints(tmp_path / "checkpoints").steps() == [3]
