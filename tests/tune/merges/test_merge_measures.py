"""Importance and loss measured on records for a merge, against the models themselves."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from posttrain.merge.api import merge
from posttrain.merge.recipe import Recipe
from posttrain.merge.statistics import Example
from posttrain.models.importance import importance_by_ablation, importance_by_gradient
from posttrain.models.language_model import LanguageModel, load_language_model
from posttrain.models.task import TaskConfig
from posttrain.models.tiny import write_tiny_model
from posttrain.store.errors import UserError
from posttrain.tune.merges.importance import measured_recipe
from posttrain.tune.merges.loss_barrier import measure_barriers
from posttrain.tune.merges.points import merge_points, read_data


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``a``, ``b`` and ``c``, of which ``c`` is alike ``a``, and a file of records."""
    root = tmp_path_factory.mktemp("models")
    for seed, name in enumerate("ab", 1):
        write_tiny_model(root / name, seed)
    write_tiny_model(root / "c", 1)
    near = load_file(root / "c" / "model.safetensors")
    save_file(
        {name: 1.01 * tensor for name, tensor in near.items()}, root / "c" / "model.safetensors", {"format": "pt"}
    )
    records = [{"prompt": f"say {number}", "completion": "it is " * (number % 3) + str(number)} for number in range(9)]
    (root / "data.jsonl").write_text("\n".join(map(json.dumps, records)))
    return root


@pytest.fixture(scope="module")
def examples(models: Path) -> list[Example]:
    return read_data(Recipe.read({"models": ["a"]}, "test"), [str(models / "data.jsonl")])[0]


def loss(lm: LanguageModel, examples: list[Example]) -> np.ndarray:
    """Returns the loss of each record, and its tokens, [records, 2]."""
    rows = []
    for prompt, answer in examples:
        example = lm.encode(prompt, answer)
        with torch.no_grad():
            logits = lm.model(input_ids=torch.tensor([example.ids])).logits[0].double().log_softmax(-1)
        at = [i for i, on in enumerate(example.supervised) if on]
        rows.append((-sum(float(logits[i - 1, example.ids[i]]) for i in at), len(at)))
    return np.array(rows)


@pytest.mark.slow
def test_barriers_are_the_losses_of_averaged_models(models: Path, examples: list[Example], tmp_path: Path) -> None:
    recipe = Recipe.read({"models": ["a", "b", "c"]}, "test")
    with merge_points(recipe, models, tmp_path) as points:
        barriers = measure_barriers(points, examples, count=3)
    assert [barrier.models for barrier in barriers] == [("a", "b"), ("a", "c"), ("b", "c")]
    assert list(tmp_path.iterdir()) == []
    for barrier in barriers:
        first, second = barrier.models
        merge([models / first, models / second], tmp_path / (first + second))
        parts = [models / first, tmp_path / (first + second), models / second]
        losses = [loss(load_language_model(part, TaskConfig(), "float32"), examples) for part in parts]
        means = [part[:, 0].sum() / part[:, 1].sum() for part in losses]
        # The average above is rounded to bfloat16.
        np.testing.assert_allclose(barrier.losses, means, rtol=2e-3)
        assert barrier.height == pytest.approx(max(0.0, means[1] - (means[0] + means[2]) / 2), abs=5e-3)
        assert barrier.low <= barrier.losses[1] - (barrier.losses[0] + barrier.losses[2]) / 2 <= barrier.high
        assert barrier.records == len(examples)
    alike = barriers[1]
    assert abs(alike.losses[1] - alike.losses[0]) < 0.01
    with merge_points(recipe, models, tmp_path / "again") as points, pytest.raises(ValueError, match="2 points"):
        measure_barriers(points, examples, count=2)


@pytest.mark.slow
@pytest.mark.parametrize("by_gradient", [True, False])
def test_a_measured_recipe_holds_each_models_importances(
    models: Path, examples: list[Example], tmp_path: Path, by_gradient: bool
) -> None:
    recipe = Recipe.read({"method": "by_importance", "models": ["a", "b"]}, "test")
    files = [str(models / "data.jsonl")]
    measured, importances = measured_recipe(recipe, models, files, by_gradient=by_gradient, parent=tmp_path)
    measure = importance_by_gradient if by_gradient else importance_by_ablation
    for number, name in enumerate("ab"):
        lm = load_language_model(models / name, TaskConfig(), "float32")
        own = measure(lm, [lm.encode(*example) for example in examples])
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
