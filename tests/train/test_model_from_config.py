"""Models that are created from a config alone."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from posttrain.models.language_model import LanguageModel
from posttrain.models.task import TaskConfig
from posttrain.store.errors import UserError
from posttrain.train.config import TrainConfig
from posttrain.train.from_scratch import random_model

Fresh = Callable[..., LanguageModel]
SCRATCH = TrainConfig(from_scratch=True, precision="float32")


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
    config = TrainConfig.read({"from_scratch": True, "precision": dtype}, "train")
    lm = random_model(weightless_folder, TaskConfig(), config, 5)
    assert lm.model.dtype == getattr(torch, dtype)
    reference = fresh()
    assert {name: weight.shape for name, weight in weights(lm).items()} == {
        name: weight.shape for name, weight in weights(reference).items()
    }
    assert lm.chat.stop_ids == reference.chat.stop_ids
    # Existing weights are ignored.
    other_lm = random_model(tiny_model, TaskConfig(), config, 5)
    assert all(torch.equal(weight, weights(other_lm)[name]) for name, weight in weights(lm).items())


def test_the_model_depends_only_on_the_seed(weightless_folder: Path) -> None:
    first = weights(random_model(weightless_folder, TaskConfig(), SCRATCH, 5))
    torch.manual_seed(123)
    state = torch.get_rng_state()
    second = weights(random_model(weightless_folder, TaskConfig(), SCRATCH, 5))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(weight, second[name]) for name, weight in first.items())
    third = weights(random_model(weightless_folder, TaskConfig(), SCRATCH, 6))
    assert not torch.equal(first["model.layers.0.mlp.up_proj.weight"], third["model.layers.0.mlp.up_proj.weight"])


def test_a_folder_without_a_model_is_refused(weightless_folder: Path) -> None:
    (weightless_folder / "config.json").write_text(json.dumps({"model_type": "nothing"}))
    with pytest.raises(UserError, match="describes no causal language model"):
        random_model(weightless_folder, TaskConfig(), SCRATCH, 0)
