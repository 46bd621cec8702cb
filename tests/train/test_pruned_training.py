"""Trainings of pruned models: their folders, their bytes after kills, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch

from posttrain.models.language_model import load_language_model
from posttrain.models.shape import read_config
from posttrain.models.task import TaskConfig
from posttrain.store.errors import UserError
from posttrain.store.hashing import file_digest
from posttrain.train.callbacks import CallbackList, TrainingStopped
from posttrain.train.config import TrainConfig
from posttrain.train.memory.weights import ModelSpec
from posttrain.train.plan import Machine, plan_training
from posttrain.train.pruning import pruned_base
from posttrain.train.shape import trained_config
from posttrain.train.stage import train
from posttrain.train.standalone import TrainJobConfig, train_standalone
from posttrain.train.training_set import read_training_set

TASK = TaskConfig(system="Name the intent.")
PRUNE = {"layers": 1, "inner": 100, "records": 5}
WEIGHTS = "model.safetensors"


def settings(prune: dict[str, Any] | None = None, **changes: Any) -> TrainConfig:
    values: dict[str, Any] = {"epochs": 2, "batch_size": 4, "learning_rate": 3e-3, "precision": "float32", **changes}
    return TrainConfig.read(values if prune is None else {**values, "prune": prune}, "train")


def run(source: Path, records: pa.Table, config: TrainConfig, folder: Path, **options: Any) -> dict[str, Any]:
    return train(source, records, config, TASK, seed=3, out=folder / "out", scratch=folder / "scratch", **options)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["full", "lora"])
@torch.no_grad()
def test_what_is_saved_is_an_ordinary_smaller_model(
    tiny_model: Path, records: pa.Table, tmp_path: Path, method: str
) -> None:
    from transformers import AutoModelForCausalLM

    with torch.enable_grad():
        summary = run(tiny_model, records, settings(PRUNE, method=method, epochs=8), tmp_path)
    assert summary["last_loss"] < summary["first_loss"]
    model: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert (model.config.num_hidden_layers, model.config.intermediate_size) == (1, 100)
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    lm = load_language_model(tmp_path / "out", TASK)
    ids = torch.tensor([[5, 6, 7, 8]])
    assert torch.equal(model(input_ids=ids).logits, lm.model(input_ids=ids).logits)
    report = summary["pruning"]
    assert report["parameters"][1] == model.num_parameters() < report["parameters"][0]
    assert report["layers"] == [max(range(2), key=lambda layer: report["block_influence"][layer])]
    assert report["records"] == 5
    # An adapter of a base that nobody has would be of no use.
    assert not (tmp_path / "out" / "adapter").exists()


def test_classifiers_are_pruned(tiny_model: Path, records: pa.Table, tmp_path: Path) -> None:
    from transformers import AutoModelForSequenceClassification

    labels = TaskConfig(labels=sorted(set(records["completion"].to_pylist())))
    config = settings(PRUNE, objective="classification")
    train(tiny_model, records, config, labels, seed=3, out=tmp_path / "out", scratch=tmp_path / "scratch")
    model: Any = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out")
    assert (model.config.num_hidden_layers, model.num_labels) == (1, len(labels.label_set))


def test_nothing_to_prune_changes_nothing(tiny_model: Path, records: pa.Table, tmp_path: Path) -> None:
    summary = run(tiny_model, records, settings({"layers": 2, "heads": 3, "inner": 288}), tmp_path / "pruned")
    assert "pruning" not in summary
    run(tiny_model, records, settings(), tmp_path / "plain")
    for name in (WEIGHTS, "config.json"):
        assert len({file_digest(tmp_path / folder / "out" / name) for folder in ("pruned", "plain")}) == 1


@pytest.mark.slow
def test_a_killed_training_ends_with_the_same_bytes(
    tiny_model: Path, records: pa.Table, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = settings(PRUNE, checkpoint={"every_seconds": None, "every_steps": 1, "background": False})
    run(tiny_model, records, config, tmp_path / "whole")
    killed = tmp_path / "killed"
    with monkeypatch.context() as patch:

        def kill(folder: Path) -> None:
            raise KeyboardInterrupt

        patch.setattr("posttrain.train.pruning.sync_tree", kill)
        with pytest.raises(KeyboardInterrupt):
            run(tiny_model, records, config, killed)
    for steps in (2, 4):
        with pytest.raises(TrainingStopped):
            run(tiny_model, records, config, killed, callbacks=CallbackList(lambda step, n=steps: step.step + 1 == n))
    with monkeypatch.context() as patch:  # what was chosen is not measured again

        def measure(*arguments: object) -> None:
            raise AssertionError

        patch.setattr("posttrain.train.pruning.importance_by_activation", measure)
        summary = run(tiny_model, records, config, killed)
    assert summary["pruning"]["layers"]
    assert len({file_digest(folder / "out" / WEIGHTS) for folder in (tmp_path / "whole", killed)}) == 1


def test_the_sample_follows_the_seed(tiny_model: Path, records: pa.Table, tmp_path: Path) -> None:
    config = settings({"layers": 1, "records": 3})
    units = read_training_set(str(tiny_model), records, config, TASK, tmp_path).units

    def influence(seed: int, folder: str) -> list[float]:
        pruned = pruned_base(tiny_model, units, config, TASK, seed, tmp_path / folder)
        values: list[float] = json.loads((pruned / "pruning.json").read_bytes())["block_influence"]
        return values

    assert influence(1, "a") == influence(1, "b")
    assert influence(1, "a") != influence(2, "c")


def test_memory_is_planned_for_the_pruned_model(tiny_model: Path, records: pa.Table, tmp_path: Path) -> None:
    run(tiny_model, records, settings(PRUNE), tmp_path)
    config = settings(PRUNE)
    assert ModelSpec.from_config(trained_config(read_config(str(tiny_model)), config), config) == ModelSpec.from_config(
        read_config(str(tmp_path / "out")), config
    )
    machine = Machine("cpu", None, 1e12, 0.5)

    def planned(config: TrainConfig) -> dict[str, Any]:
        job = TrainJobConfig(model=str(tiny_model), data="memory", train=config)
        return plan_training(job, str(tiny_model), records, machine)

    pruned, whole = planned(config), planned(settings())
    assert pruned["parameters"]["all"] < whole["parameters"]["all"]
    assert pruned["memory"]["total"] < whole["memory"]["total"]
    assert pruned["work"]["flops"] < whole["work"]["flops"]


@pytest.mark.parametrize(
    ("prune", "message"),
    [
        ({"layers": 3}, "train.prune.layers: 3 cannot be kept; the model has 2"),
        ({"heads": 1}, "train.prune.heads: 1 of 3 heads cannot be kept; keep 3: whole groups"),
        ({"inner": 289}, "train.prune.inner: 289 cannot be kept; the model has 288"),
    ],
)
def test_impossible_sizes_are_refused_before_any_work(
    tiny_model: Path, records: pa.Table, tmp_path: Path, prune: dict[str, int], message: str
) -> None:
    job = TrainJobConfig(model=str(tiny_model), data="memory", train=settings(prune))
    with pytest.raises(UserError, match=message):
        train_standalone(tmp_path / "out", job, records)
    assert not (tmp_path / "out").exists()
    with pytest.raises(UserError, match=message):
        run(tiny_model, records, settings(prune), tmp_path)
    assert not (tmp_path / "scratch").exists()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"prune": {"layers": 0}}, "prune.layers.*greater than or equal to 1"),
        ({"prune": {"layers": 1}, "from_scratch": True}, "training from scratch .* has none"),
    ],
)
def test_settings_that_cannot_be_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        TrainConfig.read(values, "train")
