"""Models from a config only."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from posttrain.models.language_model import LanguageModel
from posttrain.models.task import TaskConfig
from posttrain.store.errors import UserError
from posttrain.train.initialization.config import InitializationConfig
from posttrain.train.initialization.initialize import model_from_config

Fresh = Callable[..., LanguageModel]
XAVIER = InitializationConfig(method="xavier")


@pytest.fixture
def described(tiny_model: Path, tmp_path: Path) -> Path:
    """The tiny model's folder without weights."""
    return Path(shutil.copytree(tiny_model, tmp_path / "described", ignore=shutil.ignore_patterns("*.safetensors")))


def weights(lm: LanguageModel) -> dict[str, torch.Tensor]:
    return {name: weight.detach() for name, weight in lm.model.named_parameters()}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_folder_without_weights(
    described: Path, tiny_model: Path, fresh: Callable[..., LanguageModel], dtype: str
) -> None:
    assert not list(described.glob("*.safetensors"))
    lm = model_from_config(described, TaskConfig(), XAVIER, 5, dtype)
    assert lm.model.dtype == getattr(torch, dtype)
    known = fresh()
    assert {name: weight.shape for name, weight in weights(lm).items()} == {
        name: weight.shape for name, weight in weights(known).items()
    }
    assert lm.chat.stop_ids == known.chat.stop_ids
    # Weights that lie there are thrown away.
    other = model_from_config(tiny_model, TaskConfig(), XAVIER, 5, dtype)
    assert all(torch.equal(weight, weights(other)[name]) for name, weight in weights(lm).items())


def test_the_seed_decides_and_nothing_else_does(described: Path) -> None:
    first = weights(model_from_config(described, TaskConfig(), XAVIER, 5, "float32"))
    torch.manual_seed(123)
    state = torch.get_rng_state()
    second = weights(model_from_config(described, TaskConfig(), XAVIER, 5, "float32"))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(weight, second[name]) for name, weight in first.items())
    third = weights(model_from_config(described, TaskConfig(), XAVIER, 6, "float32"))
    assert not torch.equal(first["model.layers.0.mlp.up_proj.weight"], third["model.layers.0.mlp.up_proj.weight"])


def test_a_folder_that_describes_no_model(described: Path) -> None:
    (described / "config.json").write_text(json.dumps({"model_type": "nothing"}))
    with pytest.raises(UserError, match="describes no causal language model"):
        model_from_config(described, TaskConfig(), XAVIER, 0)
