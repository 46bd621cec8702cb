"""A process that is asked to end while it trains: the step is saved, and the same command goes on from it."""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from posttrain.models.chat import TokenizedExample
from posttrain.models.language_model import LanguageModel
from posttrain.train import trainer
from posttrain.train.checkpoint.checkpoints import Checkpoints
from posttrain.train.checkpoint.config import CheckpointConfig
from posttrain.train.config import TrainConfig

Fresh = Callable[..., LanguageModel]
Fit = Callable[..., list[Any]]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """``asked(step, signal)``: the process gets the signal in the middle of that step."""
    add_up = trainer.Trainer.accumulate_gradients

    def ask(step: int, *numbers: signal.Signals) -> None:
        def signalled(*arguments: Any) -> Any:
            result = add_up(*arguments)
            if arguments[1].step == step:
                for number in numbers:
                    os.kill(os.getpid(), number)
            return result

        monkeypatch.setattr(trainer.Trainer, "accumulate_gradients", signalled)

    return ask


@pytest.mark.parametrize(
    ("number", "ending"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)], ids=["ctrl-c", "SIGTERM"]
)
def test_the_step_is_finished_and_saved(
    fresh: Fresh,
    examples: list[TokenizedExample],
    config: TrainConfig,
    tmp_path: Path,
    fit: Fit,
    asked: Callable[..., None],
    number: signal.Signals,
    ending: type[BaseException],
) -> None:
    config = config.model_copy(update={"checkpoint": CheckpointConfig(every_seconds=1000.0)})
    handler = signal.getsignal(number)
    expected = [step.loss for step in fit(fresh(), examples, config, 0, tmp_path / "whole")]
    asked(2, number)
    with pytest.raises(ending) as caught:
        fit(fresh(), examples, config, 0, tmp_path / "asked")
    assert ending is KeyboardInterrupt or caught.value.args == (143,)
    assert signal.getsignal(number) is handler
    assert Checkpoints(tmp_path / "asked" / "checkpoints").steps() == [3]
    assert [step.loss for step in fit(fresh(), examples, config, 0, tmp_path / "asked")] == expected


def test_the_second_time_ends_it_at_once(
    fresh: Fresh,
    examples: list[TokenizedExample],
    config: TrainConfig,
    tmp_path: Path,
    fit: Fit,
    asked: Callable[..., None],
) -> None:
    config = config.model_copy(update={"checkpoint": CheckpointConfig(every_seconds=1000.0)})
    asked(2, signal.SIGINT, signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        fit(fresh(), examples, config, 0, tmp_path)
    assert not Checkpoints(tmp_path / "checkpoints").steps()


def test_the_last_step_ends_the_training(
    fresh: Fresh,
    examples: list[TokenizedExample],
    config: TrainConfig,
    tmp_path: Path,
    fit: Fit,
    asked: Callable[..., None],
) -> None:
    asked(5, signal.SIGTERM)
    assert len(fit(fresh(), examples, config, 0, tmp_path)) == 6
