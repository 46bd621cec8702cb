"""Importance measured on records for a merge, against the models themselves."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from posttrain.merge.api import merge
from posttrain.merge.recipe import Recipe
from posttrain.merge.statistics import Example
from posttrain.models.importance import importance_by_gradient
from posttrain.models.language_model import load_language_model
from posttrain.models.task import TaskConfig
from posttrain.models.tiny import write_tiny_model
from posttrain.store.errors import UserError
from posttrain.tune.merges.importance import measured_recipe, read_data


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``a`` and ``b``, and a file of records."""
    root = tmp_path_factory.mktemp("models")
    for seed, name in enumerate("ab", 1):
        write_tiny_model(root / name, seed)
    records = [{"prompt": f"say {number}", "completion": "it is " * (number % 3) + str(number)} for number in range(9)]
    (root / "data.jsonl").write_text("\n".join(map(json.dumps, records)))
    return root


@pytest.fixture(scope="module")
def examples(models: Path) -> list[Example]:
    return read_data(Recipe.read({"models": ["a"]}, "test"), [str(models / "data.jsonl")])[0]


@pytest.mark.slow
def test_a_measured_recipe_holds_each_models_importances(models: Path, examples: list[Example], tmp_path: Path) -> None:
    recipe = Recipe.read({"method": "by_importance", "models": ["a", "b"]}, "test")
    files = [str(models / "data.jsonl")]
    measured, importances = measured_recipe(recipe, models, files, tmp_path)
    assert [importance.name for importance in importances] == ["a", "b"]
    for number, name in enumerate("ab"):
        lm = load_language_model(models / name, TaskConfig(), "float32")
        own = importance_by_gradient(lm, [lm.encode(*example) for example in examples])
        for layer in range(2):
            rules = [rule for rule in measured.layers if f"layers\\.{layer}\\." in rule.match]
            expected = own.layers[:, layer].sum() / own.tokens.sum()
            interval = importances[number].layers[layer]
            assert interval.difference == pytest.approx(expected, rel=1e-4, abs=1e-7)
            assert interval.low <= interval.difference <= interval.high
            heads = np.maximum(own.heads[:, layer].sum(0) / own.tokens.sum(), 0)
            assert rules[0].parameters["importance"][number] == pytest.approx(heads, rel=1e-4, abs=1e-7)  # type: ignore[index]
            for rule in rules:
                assert rule.parameters["weight"][number] == pytest.approx(max(0, expected), rel=1e-4, abs=1e-7)  # type: ignore[index]
    merge(measured, tmp_path / "merged", root=models)
    tensors = json.loads((tmp_path / "merged" / "merge.json").read_text())["tensors"]
    attention = tensors["model.layers.1.self_attn.q_proj.weight"]["options"]
    assert [len(heads) for heads in attention["importance"]] == [3, 3]
    assert attention["importance"] != tensors["model.layers.0.self_attn.q_proj.weight"]["options"]["importance"]
    assert "importance" not in tensors["model.layers.1.mlp.up_proj.weight"]["options"]


def test_records_are_drawn_by_the_recipes_seed(models: Path, tmp_path: Path) -> None:
    file = str(models / "data.jsonl")
    values = {"models": ["a", "b"], "statistics": {"examples": 4}}
    recipes = [Recipe.read({**values, "seed": seed}, "test") for seed in (0, 0, 1)]
    drawn = [read_data(recipe, [file]) for recipe in recipes]
    assert drawn[0] == drawn[1] != drawn[2]
    assert len(drawn[0]) == 2
    assert len(drawn[0][0]) == 4
    with pytest.raises(UserError, match="3 files for 2 models"):
        read_data(recipes[0], [file] * 3)
    (tmp_path / "pool.jsonl").write_text(json.dumps({"text": "no answer"}))
    with pytest.raises(UserError, match="there are no answers"):
        read_data(recipes[0], [str(tmp_path / "pool.jsonl")])


def test_each_model_is_shown_records_as_it_was_trained(models: Path, tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / name).mkdir()
    (tmp_path / "a" / "config.yaml").write_text("task: {system: Count., template: '<{prompt}>'}\n")
    recipe, file = Recipe.read({"models": ["a", "b", "b"]}, "test"), str(models / "data.jsonl")
    trained, plain, same = read_data(recipe, [file], tmp_path)
    assert trained[0][0][0] == {"role": "system", "content": "Count."}
    content = plain[0][0][-1]["content"]
    assert trained[0][0][-1] == {"role": "user", "content": f"<{content}>"}
    assert [answer for _, answer in trained] == [answer for _, answer in plain]
    assert plain is same
    assert len(plain[0][0]) == 1


@pytest.mark.parametrize(
    "values", [{"align": "weights"}, {"models": [], "slices": [{"sources": [{"model": "a", "layer_range": [0, 1]}]}]}]
)
def test_only_whole_models_as_they_are_are_measured(models: Path, values: dict[str, Any]) -> None:
    recipe = Recipe.read({"models": ["a", "b"], **values}, "test")
    with pytest.raises(UserError, match="of whole models as they are"):
        measured_recipe(recipe, models, [str(models / "data.jsonl")])
