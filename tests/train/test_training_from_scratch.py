"""Complete trainings of models with fresh weights."""

import json
import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from posttrain.models.language_model import load_language_model
from posttrain.models.shape import meta_model, model_shape, read_config
from posttrain.models.sources import locate
from posttrain.models.task import TaskConfig
from posttrain.store.errors import UserError
from posttrain.train.checkpoint.config import CheckpointConfig
from posttrain.train.config import ShapeConfig, TrainConfig
from posttrain.train.memory.weights import ModelSpec
from posttrain.train.objectives.config import RewardConfig
from posttrain.train.shape import trained_config
from posttrain.train.stage import train

pytestmark = pytest.mark.slow

TASK = TaskConfig(system="Name the intent.")
NO_CHECKPOINTS = CheckpointConfig(every_seconds=None)


@pytest.fixture
def weightless_folder(tiny_model: Path, tmp_path: Path) -> Path:
    """The tiny model's folder without weights."""
    return Path(shutil.copytree(tiny_model, tmp_path / "weightless", ignore=shutil.ignore_patterns("*.safetensors")))


def run_training(source: Path, records: pa.Table, config: TrainConfig, folder: Path, seed: int = 3) -> dict[str, Any]:
    return train(source, records, config, TASK, seed=seed, out=folder / "out", scratch=folder / "scratch")


@pytest.mark.parametrize("precision", ["bfloat16", "autocast"])
def test_a_training_starts_from_a_config_alone(
    weightless_folder: Path, records: pa.Table, config: TrainConfig, tmp_path: Path, precision: str
) -> None:
    config = config.model_copy(
        update={"from_scratch": True, "precision": precision, "epochs": 8, "checkpoint": NO_CHECKPOINTS}
    )
    meta = run_training(weightless_folder, records, config, tmp_path)
    assert meta["last_loss"] < 0.7 * meta["first_loss"]
    assert 5 < meta["first_loss"] < 6.2, "the first loss is that of chance: ln 261 is 5.56"
    assert load_language_model(tmp_path / "out", TASK).model.config.model_type == "llama"


def test_existing_weights_are_ignored(
    tiny_model: Path, weightless_folder: Path, records: pa.Table, config: TrainConfig, tmp_path: Path
) -> None:
    config = config.model_copy(update={"from_scratch": True, "epochs": 1})
    for name, source in (("with", tiny_model), ("without", weightless_folder)):
        run_training(source, records, config, tmp_path / name)
    models = [(tmp_path / name / "out" / "model.safetensors").read_bytes() for name in ("with", "without")]
    assert models[0] == models[1]
    run_training(tiny_model, records, config, tmp_path / "other", seed=4)
    assert (tmp_path / "other" / "out" / "model.safetensors").read_bytes() != models[0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"method": "lora"}, "train.method=lora starts from trained weights"),
        ({"start": "champion"}, "train.start=champion starts from trained weights"),
        ({"objective": RewardConfig()}, "train.objective=reward starts from trained weights"),
    ],
)
def test_settings_that_need_trained_weights_are_refused(
    weightless_folder: Path,
    records: pa.Table,
    config: TrainConfig,
    tmp_path: Path,
    changes: dict[str, Any],
    message: str,
) -> None:
    config = config.model_copy(update={"from_scratch": True, **changes})
    with pytest.raises(UserError, match=message):
        run_training(weightless_folder, records, config, tmp_path)


def test_a_folder_without_weights_is_refused_where_they_are_needed(weightless_folder: Path) -> None:
    assert locate(str(weightless_folder), Path(), weights=False) == str(weightless_folder)
    with pytest.raises(UserError, match="holds no safetensors weights"):
        locate(str(weightless_folder), Path())
    (weightless_folder / "config.json").write_text(json.dumps({}))
    with pytest.raises(UserError, match="names no model_type"):
        locate(str(weightless_folder), Path(), weights=False)


def test_another_shape_is_trained_and_saved(
    weightless_folder: Path, records: pa.Table, config: TrainConfig, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    shape = ShapeConfig(layers=3, hidden=64, heads=4, kv_heads=2, inner=100)
    config = config.model_copy(update={"from_scratch": True, "shape": shape, "epochs": 8})
    summary = run_training(weightless_folder, records, config, tmp_path)
    assert summary["last_loss"] < summary["first_loss"]
    model: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert model_shape(model) == model_shape(meta_model(trained_config(read_config(str(weightless_folder)), config)))
    assert (model.config.num_hidden_layers, model.config.hidden_size, model.config.head_dim) == (3, 64, 16)
    assert (
        ModelSpec.from_model(model).count()
        == ModelSpec.from_config(trained_config(read_config(str(weightless_folder)), config), config).count()
    )


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ({"hidden": 100}, "train.shape.hidden: a hidden size of 100 cannot be divided among 3 heads"),
        (
            {"heads": 4, "kv_heads": 3},
            "train.shape.kv_heads: 4 heads cannot share 3 key and value heads",
        ),
    ],
)
def test_a_shape_that_cannot_be_is_refused_before_any_work(
    weightless_folder: Path, records: pa.Table, config: TrainConfig, tmp_path: Path, shape: dict[str, int], message: str
) -> None:
    config = config.model_copy(update={"from_scratch": True, "shape": ShapeConfig(**shape)})
    with pytest.raises(UserError, match=message):
        run_training(weightless_folder, records, config, tmp_path)
    assert not (tmp_path / "scratch").exists()


def test_a_shape_is_for_training_from_scratch() -> None:
    with pytest.raises(UserError, match="a shape is for training from scratch: set from_scratch too, or prune"):
        TrainConfig.read({"shape": {"layers": 2}}, "train")
    with pytest.raises(UserError, match="greater than or equal to 1"):
        TrainConfig.read({"from_scratch": True, "shape": {"layers": 0}}, "train")
