"""Studies over the shapes of models: what no model can have, and what a study trains."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import yaml

from posttrain.models.tiny import write_tiny_model
from posttrain.store.errors import UserError
from posttrain.testing.steps import table_of
from posttrain.train.standalone import TrainJobConfig, train_standalone
from posttrain.tune.space import Space
from posttrain.tune.trainings.config import TuneConfig
from posttrain.tune.trainings.model_checks import check_shapes
from posttrain.tune.trainings.search import tune_trainings

TRAIN = {"epochs": 1, "batch_size": 8, "precision": "float32", "prune": {"records": 4}}


def rows(start: int, count: int) -> pa.Table:
    return table_of(
        *(
            {"prompt": f"message {n} about {'cards' if n % 2 else 'cash'}", "completion": "card" if n % 2 else "cash"}
            for n in range(start, start + count)
        )
    )


@pytest.fixture(scope="module")
def deep_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with four layers."""
    return write_tiny_model(tmp_path_factory.mktemp("deep"), layers=4)


def job(model: Path, **train: Any) -> TrainJobConfig:
    values = {"model": str(model), "data": "memory", "task": {"labels": ["card", "cash"]}, "train": {**TRAIN, **train}}
    return TrainJobConfig.read(values, "config")


def study(model: Path, root: Path, tune: dict[str, Any], **train: Any) -> Any:
    held_out = [{"prompt": row["prompt"][-1]["content"], "completion": row["completion"]} for row in HELD_OUT]
    (root / "held.jsonl").write_text("".join(json.dumps(row) + "\n" for row in held_out))
    config = TuneConfig.read({"held_out": "held.jsonl", "sampler": "random", **tune}, "tune")
    return tune_trainings(job(model, **train), config, rows(0, 16), root / "out", root=root)


HELD_OUT = rows(100, 6).to_pylist()


@pytest.mark.slow
def test_a_study_of_pruned_models(deep_model: Path, tmp_path: Path) -> None:
    space = {"train.prune.layers": {"int": [1, 4]}, "train.prune.inner": [64, 288]}
    sampler = {"name": "nsga2", "population": 2}
    result = study(deep_model, tmp_path, {"space": space, "sampler": sampler, "budget": "4 trials"}, method="lora")
    assert [str(trial.state) for trial in result.trials] == ["finished"] * 4
    assert len({tuple(trial.settings.values()) for trial in result.trials}) > 1
    best = TrainJobConfig.read(yaml.safe_load((tmp_path / "out" / "best.yaml").read_text()), "best.yaml")
    assert (best.train.prune.layers, best.train.prune.inner) == tuple(result.best.settings.values())
    train_standalone(tmp_path / "model", best, rows(0, 16), deep_model)
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    assert config["num_hidden_layers"] == best.train.prune.layers
    assert config["intermediate_size"] == best.train.prune.inner


@pytest.mark.parametrize(
    ("space", "train", "message"),
    [
        # One of 289 values is too large: few random points would meet it.
        (
            {"train.prune.inner": {"int": [1, 289]}},
            {},
            "tune.space: 289 cannot be kept, as with train.prune.inner = 289; the model has 288",
        ),
        ({"train.prune.layers": [1, 4, 5]}, {}, "5 cannot be kept, as with train.prune.layers = 5; the model has 4"),
        ({"train.prune.heads": [1, 3]}, {}, "1 of 3 heads cannot be kept, as with train.prune.heads = 1; keep 3"),
        (
            {"train.prune.layers": {"derive": "2 * half"}, "half": {"int": [1, 3]}},
            {},
            "6 cannot be kept, as with train.prune.layers = 6",
        ),
        (
            {"train.learning_rate": [1e-4, 1e-3]},
            {"prune": {"layers": 7}},
            "train.prune.layers: 7 cannot be kept; the model has 4",
        ),
        (
            {"train.prune.layers": [0, 2]},
            {},
            "`train.prune.layers`: Input should be greater than or equal to 1, as with train.prune.layers = 0",
        ),
        # Of nine combinations, one cannot be.
        (
            {"train.shape.hidden": [96, 120, 64], "train.shape.heads": [2, 3, 4]},
            {"from_scratch": True},
            "tune.space: a hidden size of 64 cannot be divided among 3 heads, as with "
            "train.shape.hidden = 64, train.shape.heads = 3; give a multiple of 6",
        ),
        (
            {"train.shape.layers": [1, 2]},
            {},
            "a shape is for training from scratch: set from_scratch too, or prune a trained model",
        ),
        (
            {"train.prune.layers": [1, 2]},
            {"from_scratch": True},
            "training from scratch (from_scratch) has none",
        ),
    ],
)
def test_impossible_shapes_are_named_before_a_study(
    deep_model: Path, tmp_path: Path, space: dict[str, Any], train: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError) as error:
        study(deep_model, tmp_path, {"space": space, "budget": "2 trials"}, **train)
    assert message in str(error.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_the_shapes_of_a_space_that_are_possible_pass(deep_model: Path) -> None:
    entries = {"train.prune.layers": {"int": [1, 4]}, "train.prune.inner": {"int": [1, 288]}}
    base = job(deep_model).model_dump(mode="json")
    check_shapes(Space(entries), base, str(deep_model))
    wrong = Space({**entries, "train.prune.layers": {"int": [1, 5]}}, ["train.prune.layers < 5"])
    check_shapes(wrong, base, str(deep_model))  # what constraints exclude is not drawn


@pytest.mark.slow
def test_a_study_of_shapes_from_scratch(deep_model: Path, tmp_path: Path) -> None:
    shape = "train.shape"
    space = {f"{shape}.layers": {"int": [1, 4]}, f"{shape}.hidden": [32, 64, 96], f"{shape}.inner": [64, 128]}
    tune = {
        "space": {**space, f"{shape}.heads": 2},
        "sampler": {"name": "nsga2", "population": 3},
        "limits": {"parameters": "60K"},
        "budget": "8 trials",
    }
    result = study(deep_model, tmp_path, tune, from_scratch=True)
    finished = [trial for trial in result.trials if not trial.error]
    assert finished
    assert len(finished) < len(result.trials)
    for trial in result.trials:
        layers, hidden, inner = (trial.settings[f"{shape}.{name}"] for name in ("layers", "hidden", "inner"))
        # Embeddings, norms, queries and outputs, one of two heads for keys and values, and the feed-forward block.
        count = 261 * hidden + hidden + layers * (2 * hidden + 3 * hidden**2 + 3 * hidden * inner)
        assert bool(trial.error) == (count > 60_000)
        assert not trial.error or trial.error == f"parameters {count:,} is over the limit, 60,000"
    assert yaml.safe_load((tmp_path / "out" / "best.yaml").read_text())["train"]["shape"]["heads"] == 2
