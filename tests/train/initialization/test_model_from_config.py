"""Models initialised from a config alone."""

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
def weightless_folder(tiny_model: Path, tmp_path: Path) -> Path:
    """The tiny model's folder without weights."""
    return Path(shutil.copytree(tiny_model, tmp_path / "weightless", ignore=shutil.ignore_patterns("*.safetensors")))


def weights(lm: LanguageModel) -> dict[str, torch.Tensor]:
    return {name: weight.detach() for name, weight in lm.model.named_parameters()}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_folder_without_weights_gives_a_fresh_model(
    weightless_folder: Path, tiny_model: Path, fresh: Callable[..., LanguageModel], dtype: str
) -> None:
    assert not list(weightless_folder.glob("*.safetensors"))
    lm = model_from_config(weightless_folder, TaskConfig(), XAVIER, 5, dtype)
    assert lm.model.dtype == getattr(torch, dtype)
    reference = fresh()
    assert {name: weight.shape for name, weight in weights(lm).items()} == {
        name: weight.shape for name, weight in weights(reference).items()
    }
    assert lm.chat.stop_ids == reference.chat.stop_ids
    # Existing weights are ignored.
    other_lm = model_from_config(tiny_model, TaskConfig(), XAVIER, 5, dtype)
    assert all(torch.equal(weight, weights(other_lm)[name]) for name, weight in weights(lm).items())


def test_the_model_depends_only_on_the_seed(weightless_folder: Path) -> None:
    first = weights(model_from_config(weightless_folder, TaskConfig(), XAVIER, 5, "float32"))
    torch.manual_seed(123)
    state = torch.get_rng_state()
    second = weights(model_from_config(weightless_folder, TaskConfig(), XAVIER, 5, "float32"))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(weight, second[name]) for name, weight in first.items())
    third = weights(model_from_config(weightless_folder, TaskConfig(), XAVIER, 6, "float32"))
    assert not torch.equal(first["model.layers.0.mlp.up_proj.weight"], third["model.layers.0.mlp.up_proj.weight"])


def test_a_folder_without_a_model_is_refused(weightless_folder: Path) -> None:
    (weightless_folder / "config.json").write_text(json.dumps({"model_type": "nothing"}))
    with pytest.raises(UserError, match="describes no causal language model"):
        model_from_config(weightless_folder, TaskConfig(), XAVIER, 0)
