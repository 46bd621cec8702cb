"""Whole trainings of models that nobody trained before."""

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch

from posttrain.models.language_model import load_language_model
from posttrain.models.sources import locate
from posttrain.models.task import TaskConfig
from posttrain.store.errors import UserError
from posttrain.train.checkpoint.config import CheckpointConfig
from posttrain.train.config import TrainConfig
from posttrain.train.initialization.config import InitializationConfig, InitRuleConfig
from posttrain.train.objectives.sft import SftObjective
from posttrain.train.stage import train

pytestmark = pytest.mark.slow

TASK = TaskConfig(system="Name the intent.")
NEVER = CheckpointConfig(every_seconds=None)
GPT2 = InitializationConfig(method="depth_scaled", std=0.05)


@pytest.fixture
def described(tiny_model: Path, tmp_path: Path) -> Path:
    """The tiny model's folder without weights."""
    return Path(shutil.copytree(tiny_model, tmp_path / "described", ignore=shutil.ignore_patterns("*.safetensors")))


def trained(source: Path, records: pa.Table, config: TrainConfig, folder: Path, seed: int = 3) -> dict[str, Any]:
    return train(source, records, config, TASK, seed=seed, out=folder / "out", scratch=folder / "scratch")


@pytest.mark.parametrize("precision", ["float32", "bfloat16", "float16", "autocast"])
def test_from_a_config_alone(
    described: Path, records: pa.Table, config: TrainConfig, tmp_path: Path, precision: str
) -> None:
    config = config.model_copy(
        update={"initialization": GPT2, "precision": precision, "epochs": 8, "checkpoint": NEVER}
    )
    meta = trained(described, records, config, tmp_path)
    assert meta["last_loss"] < 0.7 * meta["first_loss"]
    assert 5 < meta["first_loss"] < 6.2, "nothing is known at first: ln 261 is 5.56"
    table = meta["initialization"]
    assert [row["layer"] for row in table] == ["embeddings", "0", "1"]
    assert table[0]["activations"] == pytest.approx(0.05**2, rel=0.3)
    assert all(row["gradients"] > 0 for row in table)
    assert load_language_model(tmp_path / "out", TASK).model.config.model_type == "llama"


def test_variances_do_not_depend_on_the_precision(
    described: Path, records: pa.Table, config: TrainConfig, tmp_path: Path
) -> None:
    result = {
        precision: trained(
            described,
            records,
            config.model_copy(update={"initialization": GPT2, "precision": precision, "epochs": 1}),
            tmp_path / precision,
        )["initialization"]
        for precision in ("float32", "float16")
    }
    for exact, half in zip(result["float32"], result["float16"], strict=True):
        assert half["activations"] == pytest.approx(exact["activations"], rel=0.02)
        assert half["gradients"] == pytest.approx(exact["gradients"], rel=0.02)


def test_the_table_is_logged_and_what_is_wrong_is_warned_of(
    described: Path, records: pa.Table, config: TrainConfig, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = config.model_copy(update={"epochs": 1})
    with caplog.at_level(logging.INFO, "posttrain"):
        trained(described, records, config.model_copy(update={"initialization": GPT2}), tmp_path / "well")
    assert any("variance of activations and of gradients by layer" in line for line in caplog.messages)
    assert not any("changes by" in line for line in caplog.messages)
    caplog.clear()
    huge = [InitRuleConfig(match=r"layers\.1\..*(down|gate|up)_proj", method="normal", std=3.0)]
    rules = GPT2.model_copy(update={"rules": huge})
    trained(described, records, config.model_copy(update={"initialization": rules}), tmp_path / "badly")
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert any("the variance of activations changes by" in line for line in warnings)
    assert all("from layer 0 to layer 1" in line for line in warnings if "changes by" in line)


def test_memory_runs_out_at_the_first_look(
    described: Path, records: pa.Table, config: TrainConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fewer examples are looked at."""
    sizes, loss = [], SftObjective.loss

    def short(self: SftObjective, lm: Any, packed: Any, rows: list[int]) -> Any:
        sizes.append(packed.sequences)
        if packed.sequences > 1:
            raise torch.OutOfMemoryError("planted")
        return loss(self, lm, packed, rows)

    monkeypatch.setattr(SftObjective, "loss", short)
    config = config.model_copy(update={"initialization": GPT2, "epochs": 1})
    result = trained(described, records, config, tmp_path)["initialization"]
    assert sizes[0] == 4
    assert sizes[-1] == 1
    assert [item["layer"] for item in result] == ["embeddings", "0", "1"]


def test_looking_changes_nothing(
    tiny_model: Path, records: pa.Table, config: TrainConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from posttrain.train import setup

    config = config.model_copy(update={"initialization": GPT2})
    trained(tiny_model, records, config, tmp_path / "seen")
    monkeypatch.setattr(setup, "activation_stats", lambda *arguments, **options: [])
    assert "initialization" not in trained(tiny_model, records, config, tmp_path / "unseen")
    seen, unseen = (tmp_path / name / "out" / "model.safetensors" for name in ("seen", "unseen"))
    assert seen.read_bytes() == unseen.read_bytes()


def test_weights_that_lie_there_are_thrown_away(
    tiny_model: Path, described: Path, records: pa.Table, config: TrainConfig, tmp_path: Path
) -> None:
    config = config.model_copy(update={"initialization": GPT2, "epochs": 1})
    for name, source in (("with", tiny_model), ("without", described)):
        trained(source, records, config, tmp_path / name)
    models = [(tmp_path / name / "out" / "model.safetensors").read_bytes() for name in ("with", "without")]
    assert models[0] == models[1]
    trained(tiny_model, records, config, tmp_path / "other", seed=4)
    assert (tmp_path / "other" / "out" / "model.safetensors").read_bytes() != models[0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"method": "lora"}, "train.method=lora starts from trained weights"),
        ({"start": "champion"}, "train.start=champion starts from trained weights"),
        ({"objective": "reward"}, "train.objective=reward starts from trained weights"),
    ],
)
def test_what_needs_trained_weights(
    described: Path, records: pa.Table, config: TrainConfig, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    config = config.model_copy(update={"initialization": GPT2, **changes})
    with pytest.raises(UserError, match=message):
        trained(described, records, config, tmp_path)


def test_a_folder_without_weights_is_a_model_only_then(described: Path) -> None:
    assert locate(str(described), Path(), weights=False) == str(described)
    with pytest.raises(UserError, match="holds no safetensors weights"):
        locate(str(described), Path())
    (described / "config.json").write_text(json.dumps({}))
    with pytest.raises(UserError, match="names no model_type"):
        locate(str(described), Path(), weights=False)
