"""A profile of real steps: planted slowness is found where it was planted, forwards and backwards."""

import gzip
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from posttrain.models.language_model import LanguageModel
from posttrain.train.monitor.config import ProfileConfig
from posttrain.train.monitor.meter import phase
from posttrain.train.monitor.profile import TABLE, TRACE, attribute_time, profile_steps

pytestmark = pytest.mark.slow

PAUSE = 0.1


class _SlowBack(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, states: torch.Tensor) -> torch.Tensor:
        return states.clone()

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> Any:
        time.sleep(PAUSE)
        return gradient


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


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> dict[str, dict[str, float]]:
    """The parts that the last profile found."""
    result: dict[str, dict[str, float]] = {}

    def kept(events: Any, *, on_accelerator: bool) -> dict[str, dict[str, float]]:
        result.update(attribute_time(events, on_accelerator=on_accelerator))
        return result

    monkeypatch.setattr("posttrain.train.monitor.profile.attribute_time", kept)
    return result


def profile(lm: LanguageModel, folder: Path, steps: int = 1, wait: float = 0.0) -> str:
    with profile_steps(lm, ProfileConfig(steps=steps, after=1), folder, steps + 2) as step_done:
        assert step_done is not None
        for _ in range(steps + 2):
            step(lm, wait)
            step_done()
    return (folder / TABLE).read_text()


@contextmanager
def slow(module: Any, change: Callable[[Any], Any]) -> Iterator[None]:
    """The module's forward, with something done to what it gives."""
    before = module.forward

    def forward(*arguments: Any, **named: Any) -> Any:
        return change(before(*arguments, **named))

    module.forward = forward
    yield
    del module.forward


def paused(output: Any) -> Any:
    time.sleep(PAUSE)
    return output


def slow_back(output: Any) -> Any:
    if isinstance(output, tuple):
        return _SlowBack.apply(output[0]), *output[1:]
    return _SlowBack.apply(output)


def place(lm: LanguageModel, part: str) -> Any:
    layer = lm.decoder.layers[0]
    return {
        "attention": layer.self_attn,
        "linear": layer.mlp.down_proj,
        "rest": layer.mlp.act_fn,
        "embedding": lm.decoder.embed_tokens,
    }[part]


@pytest.mark.parametrize("part", ["attention", "linear", "rest", "embedding"])
def test_what_is_slow_forwards_is_told(
    lm: LanguageModel, tmp_path: Path, seen: dict[str, dict[str, float]], part: str
) -> None:
    with slow(place(lm, part), paused):
        profile(lm, tmp_path)
    assert seen["forward"][part] > 0.7
    assert sum(seen["forward"].values()) == pytest.approx(1)


@pytest.mark.parametrize("part", ["attention", "linear", "rest", "embedding"])
def test_what_is_slow_backwards_is_told(
    lm: LanguageModel, tmp_path: Path, seen: dict[str, dict[str, float]], part: str
) -> None:
    with slow(place(lm, part), slow_back):
        profile(lm, tmp_path)
    assert seen["backward"][part] > 0.7
    assert sum(seen["backward"].values()) == pytest.approx(1)


def test_the_head_and_the_sums_are_told_apart(
    lm: LanguageModel, tmp_path: Path, seen: dict[str, dict[str, float]]
) -> None:
    with slow(lm.model.get_output_embeddings(), slow_back):
        profile(lm, tmp_path)
    assert seen["backward"]["head"] > 0.7
    weight = lm.decoder.layers[0].mlp.up_proj.weight
    hook = weight.register_post_accumulate_grad_hook(lambda weight: time.sleep(PAUSE))
    profile(lm, tmp_path)
    hook.remove()
    assert seen["backward"]["sums"] > 0.7


def test_what_is_computed_again_is_told(lm: LanguageModel, tmp_path: Path, seen: dict[str, dict[str, float]]) -> None:
    mlp = lm.decoder.layers[1].mlp
    inner = mlp.forward
    mlp.forward = lambda states: checkpoint(inner, states, use_reentrant=False)
    with slow(mlp.up_proj, paused):  # what follows the last thing that is kept is not computed again
        profile(lm, tmp_path)
    del mlp.forward
    assert seen["forward"]["linear"] > 0.7
    assert seen["backward"]["again"] > 0.7


def test_a_trace_and_a_table_are_written_and_nothing_stays_behind(
    lm: LanguageModel, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", logger="posttrain"):
        text = profile(lm, tmp_path / "profile", steps=2, wait=0.05)
    assert text.startswith("Where the time of a step went (2 steps of ")
    assert "waiting for data: " in text
    assert text.splitlines()[0] in caplog.text
    trace = json.loads(gzip.decompress((tmp_path / "profile" / TRACE).read_bytes()))
    names = [event.get("name") for event in trace["traceEvents"]]
    assert names.count("phase: backward") >= 2
    assert {"part: attention", "part: linear", "part: embedding"} <= set(names)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in lm.model.modules())


@pytest.mark.parametrize(("steps", "done"), [(1, "one step"), (2, "2 steps"), (9, "3 steps")])
def test_a_training_shorter_than_what_was_asked_for_is_profiled_all_the_same(
    lm: LanguageModel, tmp_path: Path, steps: int, done: str
) -> None:
    with profile_steps(lm, ProfileConfig(steps=3, after=2), tmp_path, steps) as step_done:
        assert step_done is not None
        for _ in range(steps):
            step(lm)
            step_done()
    assert f"({done} of" in (tmp_path / TABLE).read_text()


def test_a_training_that_fails_amid_leaves_what_was_seen(lm: LanguageModel, tmp_path: Path) -> None:
    def fail() -> None:
        with profile_steps(lm, ProfileConfig(steps=5, after=0), tmp_path, 9) as step_done:
            assert step_done is not None
            step(lm)
            step_done()
            raise ValueError("planted")

    with pytest.raises(ValueError, match="planted"):
        fail()
    assert "(one step of" in (tmp_path / TABLE).read_text()


def test_nothing_is_written_unless_asked_for(lm: LanguageModel, tmp_path: Path) -> None:
    with profile_steps(lm, ProfileConfig(), tmp_path / "profile", 3) as step_done:
        assert step_done is None
        step(lm)
    assert not (tmp_path / "profile").exists()
