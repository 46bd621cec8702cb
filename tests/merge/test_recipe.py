"""Recipes in our keys and in mergekit's, and the values that options have for each tensor."""

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from model_family import weights_of

from posttrain.merge.api import merge
from posttrain.merge.recipe import Position, Recipe, read_recipe, resolve
from posttrain.store.errors import UserError


def written(folder: Path, values: dict[str, Any]) -> Path:
    """Writes a recipe's file."""
    file = folder / "recipe.yaml"
    file.write_text(yaml.safe_dump(values))
    return file


def assert_equal(folder: Path, expected: dict[str, torch.Tensor]) -> None:
    """Asserts that a merged model has these weights, but for float32's rounding."""
    weights = weights_of(folder)
    assert weights.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(weights[name], tensor, rtol=1e-6, atol=1e-7, msg=name)


@pytest.mark.parametrize(
    ("value", "name", "depth", "expected"),
    [
        (0.3, "model.layers.0.mlp.up_proj.weight", 0.0, 0.3),
        ([0.0, 0.5, 1.0], "x", 0.0, 0.0),
        ([0.0, 0.5, 1.0], "x", 0.25, 0.25),
        ([0.0, 0.5, 1.0], "x", 1.0, 1.0),
        ([0.2], "x", 0.7, 0.2),
        # Outside of the layers the first number counts, as in mergekit.
        ([0.4, 1.0], "model.embed_tokens.weight", None, 0.4),
        ([{"filter": "mlp", "value": 1}, {"value": 2}], "model.layers.0.mlp.up_proj.weight", 0.0, 1),
        ([{"filter": "mlp", "value": 1}, {"value": 2}], "model.layers.0.self_attn.q_proj.weight", 0.0, 2),
        ([{"filter": "mlp", "value": 1}], "model.norm.weight", None, None),
        ([{"match": r"layers\.[01]\.", "value": [3, 5]}, {"value": 2}], "model.layers.1.mlp.x", 0.5, 4.0),
    ],
)
def test_an_option_has_a_value_for_each_tensor(value: Any, name: str, depth: float | None, expected: Any) -> None:
    assert resolve(value, Position(name, depth), "weight") == expected


@pytest.mark.parametrize("value", [[], [1, {"value": 2}], [True, 1], [{"filtr": "mlp", "value": 1}]])
def test_a_mixed_list_is_a_mistake(value: Any) -> None:
    with pytest.raises(UserError, match="weight"):
        resolve(value, Position("x", 0.0), "weight")


def test_mergekits_keys_are_ours(tmp_path: Path) -> None:
    theirs = read_recipe(
        written(
            tmp_path,
            {
                "merge_method": "ties",
                "base_model": "base",
                "models": [{"model": "a", "parameters": {"weight": 0.3, "density": [0.1, 0.9]}}, {"model": "b"}],
                "parameters": {"normalize": False, "int8_mask": True},
                "dtype": "float32",
                "out_dtype": "bfloat16",
                "tokenizer_source": "base",
            },
        )
    )
    ours = Recipe.read(
        {
            "method": "ties",
            "base": "base",
            "models": [{"model": "a", "weight": 0.3, "density": [0.1, 0.9]}, "b"],
            # mergekit's default, where ours is the paper's.
            "parameters": {"normalize": False, "density": 1.0},
            "dtype": "bfloat16",
        },
        "recipe",
    )
    assert theirs == ours


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"models": []}, "name the models"),
        ({"models": ["a"], "slices": [{"sources": [{"model": "a", "layer_range": [0, 1]}]}]}, "exclude"),
        ({"models": ["a"], "metod": "ties"}, "did you mean `method`"),
        ({"models": ["a"], "method": "tie"}, "did you mean `ties`"),
        ({"models": [""]}, "model"),
        ({"slices": [{"sources": [{"model": "a", "layer_range": [2, 2]}]}]}, "hold no layer"),
        (
            {"slices": [{"sources": [{"model": m, "layer_range": [0, n]} for m, n in (("a", 1), ("b", 2))]}]},
            "different",
        ),
        ({"models": ["a"], "layers": [{"match": "("}]}, "not a regular expression"),
        ({"models": ["a"], "dtype": "int8"}, "dtype"),
    ],
)
def test_a_wrong_recipe_is_one_line(values: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        Recipe.read(values, "recipe.yaml")


def test_weights_may_rise_over_the_layers(family: Path, tmp_path: Path) -> None:
    models = [{"model": "a", "weight": [0, 1]}, {"model": "b", "weight": [{"filter": "mlp", "value": 3}, {"value": 1}]}]
    merge({"models": models, "dtype": "float32"}, tmp_path / "out", root=family)
    first, second = weights_of(family / "a"), weights_of(family / "b")
    expected = {}
    for name in first:
        layer = int(name.split(".")[2]) if ".layers." in name else 0
        weights = layer / 3, 3.0 if "mlp" in name else 1.0
        expected[name] = (weights[0] * first[name] + weights[1] * second[name]) / sum(weights)
    assert_equal(tmp_path / "out", expected)


def test_a_rule_gives_layers_another_method(family: Path, tmp_path: Path) -> None:
    recipe = {
        "method": "task_arithmetic",
        "base": "base",
        "models": ["a", "b"],
        "parameters": {"weight": [0.5, 0.25]},
        "layers": [{"match": r"layers\.0\.", "method": "linear", "weight": 1}, {"match": "norm", "weight": 0}],
        "dtype": "float32",
    }
    merge(recipe, tmp_path / "out", root=family)
    base, first, second = (weights_of(family / name) for name in ("base", "a", "b"))
    expected = {}
    for name, start in base.items():
        weights = (0.0, 0.0) if "norm" in name else (0.5, 0.25)
        expected[name] = start + weights[0] * (first[name] - start) + weights[1] * (second[name] - start)
        if ".layers.0." in name:
            expected[name] = (first[name] + second[name]) / 2
    assert_equal(tmp_path / "out", expected)


def test_slices_stack_layers_and_renumber_them(family: Path, tmp_path: Path) -> None:
    slices = [
        {"sources": [{"model": "a", "layer_range": [0, 3]}]},
        {
            "sources": [
                {"model": "b", "layer_range": [1, 3], "parameters": {"weight": 1}},
                {"model": "c", "layer_range": [2, 4], "parameters": {"weight": 3}},
            ]
        },
    ]
    merge({"slices": slices, "dtype": "float32"}, tmp_path / "out", root=family)
    models = {name: weights_of(family / name) for name in "abc"}
    merged = weights_of(tmp_path / "out")
    assert {name.split(".")[2] for name in merged if ".layers." in name} == set("01234")
    for name, tensor in merged.items():
        if ".layers." not in name:
            # Before the layers the first slice's models count, behind them the last one's.
            expected = models["a"][name] if "embed" in name else (models["b"][name] + 3 * models["c"][name]) / 4
        else:
            layer = int(name.split(".")[2])
            other = name.replace(f".{layer}.", ".{}.", 1)
            if layer < 3:
                expected = models["a"][name]
            else:
                expected = (models["b"][other.format(layer - 2)] + 3 * models["c"][other.format(layer - 1)]) / 4
        torch.testing.assert_close(tensor, expected, rtol=1e-6, atol=1e-7, msg=name)
    from posttrain.models.language_model import load_transformers

    model, _ = load_transformers(tmp_path / "out")
    assert model.config.num_hidden_layers == 5


def test_a_layer_that_is_not_there_is_named(family: Path, tmp_path: Path) -> None:
    slices = [{"sources": [{"model": "a", "layer_range": [3, 5]}]}]
    with pytest.raises(UserError, match="`a` has no layer 4; it has 4 layers"):
        merge({"slices": slices}, tmp_path / "out", root=family)
