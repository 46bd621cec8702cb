"""A profile of real steps: a trace, and a table of operations."""

import gzip
import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from posttrain.models.language_model import LanguageModel
from posttrain.train.monitor.config import ProfileConfig
from posttrain.train.monitor.meter import phase
from posttrain.train.monitor.profile import TABLE, TRACE, profile_steps

pytestmark = pytest.mark.slow


def step(lm: LanguageModel, wait: float = 0.0) -> None:
    with phase("data"):
        time.sleep(wait)
        ids = torch.arange(3, 35)[None]
    with phase("forward"):
        states = lm.decoder(input_ids=ids, use_cache=False).last_hidden_state
        with phase("head"):
            loss = lm.logits(states[0]).log_softmax(-1)[:, 0].sum()
    with phase("backward"):
        loss.backward()
    with phase("optimizer"):
        for weight in lm.model.parameters():
            weight.grad = None


@pytest.fixture
def lm(fresh: Callable[..., LanguageModel]) -> LanguageModel:
    return fresh()


def profile(lm: LanguageModel, folder: Path, steps: int = 1, wait: float = 0.0) -> str:
    with profile_steps(lm, ProfileConfig(steps=steps), folder, steps + 3) as step_done:
        for _ in range(steps + 3):
            step(lm, wait)
            step_done()
    return (folder / TABLE).read_text()


def test_a_trace_and_a_table_are_written(lm: LanguageModel, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="posttrain"):
        text = profile(lm, tmp_path / "profile", steps=2, wait=0.05)
    assert "aten::mm" in text
    assert "phase: backward" in text
    assert str(tmp_path / "profile") in caplog.text
    trace = json.loads(gzip.decompress((tmp_path / "profile" / TRACE).read_bytes()))
    names = [event.get("name") for event in trace["traceEvents"]]
    assert names.count("phase: backward") >= 2


def count_backward_passes(folder: Path) -> int:
    """The number of backward passes that a trace has marked."""
    trace = json.loads(gzip.decompress((folder / TRACE).read_bytes()))
    return sum(
        event.get("name") == "phase: backward" and event.get("cat") == "user_annotation"
        for event in trace["traceEvents"]
    )


@pytest.mark.parametrize(("steps", "profiled"), [(1, 1), (9, 3)])
def test_a_shorter_training_is_profiled_too(lm: LanguageModel, tmp_path: Path, steps: int, profiled: int) -> None:
    with profile_steps(lm, ProfileConfig(steps=3), tmp_path, steps) as step_done:
        for _ in range(steps):
            step(lm)
            step_done()
    assert count_backward_passes(tmp_path) == profiled


def test_a_failing_training_still_writes_its_profile(lm: LanguageModel, tmp_path: Path) -> None:
    def fail() -> None:
        with profile_steps(lm, ProfileConfig(steps=5), tmp_path, 9) as step_done:
            for _ in range(3):
                step(lm)
                step_done()
            raise ValueError("planted")

    with pytest.raises(ValueError, match="planted"):
        fail()
    assert count_backward_passes(tmp_path) == 1


def test_without_a_profile_config_nothing_is_written(lm: LanguageModel, tmp_path: Path) -> None:
    with profile_steps(lm, ProfileConfig(), tmp_path / "profile", 3) as step_done:
        step(lm)
        step_done()
    assert not (tmp_path / "profile").exists()
