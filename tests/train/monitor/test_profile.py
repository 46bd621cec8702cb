"""A profile of real steps: planted delays are attributed to the right part, forward and backward."""

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

PAUSE = 0.3  # longer than a whole step on a busy machine


class _SlowBackward(torch.autograd.Function):
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
def profile_parts(monkeypatch: pytest.MonkeyPatch) -> dict[str, dict[str, float]]:
    """The shares of the parts in the last profile."""
    result: dict[str, dict[str, float]] = {}

    def record_parts(events: Any, *, on_accelerator: bool) -> dict[str, dict[str, float]]:
        result.update(attribute_time(events, on_accelerator=on_accelerator))
        return result

    monkeypatch.setattr("posttrain.train.monitor.profile.attribute_time", record_parts)
    return result


def profile(lm: LanguageModel, folder: Path, steps: int = 1, wait: float = 0.0) -> str:
    with profile_steps(lm, ProfileConfig(steps=steps), folder, steps + 3) as step_done:
        assert step_done is not None
        for _ in range(steps + 3):
            step(lm, wait)
            step_done()
    return (folder / TABLE).read_text()


@contextmanager
def change_output(module: Any, change: Callable[[Any], Any]) -> Iterator[None]:
    """Applies ``change`` to the output of the module's forward."""
    original = module.forward

    def forward(*arguments: Any, **options: Any) -> Any:
        return change(original(*arguments, **options))

    module.forward = forward
    yield
    del module.forward


def pause(output: Any) -> Any:
    time.sleep(PAUSE)
    return output


def pause_backward(output: Any) -> Any:
    if isinstance(output, tuple):
        return _SlowBackward.apply(output[0]), *output[1:]
    return _SlowBackward.apply(output)


def module_of(lm: LanguageModel, part: str) -> Any:
    layer = lm.decoder.layers[0]
    return {
        "attention": layer.self_attn,
        "linear": layer.mlp.down_proj,
        "rest": layer.mlp.act_fn,
        "embedding": lm.decoder.embed_tokens,
    }[part]


def largest(shares: dict[str, float]) -> str:
    """The part with the largest share; how large it is depends on what else the machine does."""
    return max(shares, key=shares.__getitem__)


@pytest.mark.parametrize("part", ["attention", "rest"])
def test_a_slow_forward_is_attributed_to_its_part(
    lm: LanguageModel, tmp_path: Path, profile_parts: dict[str, dict[str, float]], part: str
) -> None:
    with change_output(module_of(lm, part), pause):
        profile(lm, tmp_path)
    assert largest(profile_parts["forward"]) == part
    assert sum(profile_parts["forward"].values()) == pytest.approx(1)


@pytest.mark.parametrize("part", ["linear", "embedding"])
def test_a_slow_backward_is_attributed_to_its_part(
    lm: LanguageModel, tmp_path: Path, profile_parts: dict[str, dict[str, float]], part: str
) -> None:
    with change_output(module_of(lm, part), pause_backward):
        profile(lm, tmp_path)
    assert largest(profile_parts["backward"]) == part
    assert sum(profile_parts["backward"].values()) == pytest.approx(1)


def test_the_head_and_the_gradient_sums_are_separate(
    lm: LanguageModel, tmp_path: Path, profile_parts: dict[str, dict[str, float]]
) -> None:
    with change_output(lm.model.get_output_embeddings(), pause_backward):
        profile(lm, tmp_path)
    assert largest(profile_parts["backward"]) == "head"
    weight = lm.decoder.layers[0].mlp.up_proj.weight
    hook = weight.register_post_accumulate_grad_hook(lambda weight: time.sleep(PAUSE))
    profile(lm, tmp_path)
    hook.remove()
    assert largest(profile_parts["backward"]) == "sums"


def test_recomputation_is_a_separate_part(
    lm: LanguageModel, tmp_path: Path, profile_parts: dict[str, dict[str, float]]
) -> None:
    mlp = lm.decoder.layers[1].mlp
    original = mlp.forward
    mlp.forward = lambda states: checkpoint(original, states, use_reentrant=False)
    with change_output(mlp.up_proj, pause):  # what follows the last saved tensor is not recomputed
        profile(lm, tmp_path)
    del mlp.forward
    assert largest(profile_parts["forward"]) == "linear"
    assert largest(profile_parts["backward"]) == "again"


def test_a_trace_and_a_table_are_written(lm: LanguageModel, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
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


@pytest.mark.parametrize(("steps", "text"), [(1, "one step"), (9, "3 steps")])
def test_a_shorter_training_is_profiled_too(lm: LanguageModel, tmp_path: Path, steps: int, text: str) -> None:
    with profile_steps(lm, ProfileConfig(steps=3), tmp_path, steps) as step_done:
        assert step_done is not None
        for _ in range(steps):
            step(lm)
            step_done()
    assert f"({text} of" in (tmp_path / TABLE).read_text()


def test_a_failing_training_still_writes_its_profile(lm: LanguageModel, tmp_path: Path) -> None:
    def fail() -> None:
        with profile_steps(lm, ProfileConfig(steps=5), tmp_path, 9) as step_done:
            assert step_done is not None
            for _ in range(3):
                step(lm)
                step_done()
            raise ValueError("planted")

    with pytest.raises(ValueError, match="planted"):
        fail()
    assert "(one step of" in (tmp_path / TABLE).read_text()


def test_without_a_profile_config_nothing_is_written(lm: LanguageModel, tmp_path: Path) -> None:
    with profile_steps(lm, ProfileConfig(), tmp_path / "profile", 3) as step_done:
        assert step_done is None
        step(lm)
    assert not (tmp_path / "profile").exists()
