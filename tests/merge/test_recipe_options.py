"""mergekit's names for options."""

import pytest

from posttrain.merge.recipe import Recipe
from posttrain.store.errors import UserError


def test_lambda_is_scale_wherever_options_stand() -> None:
    recipe = Recipe.read(
        {
            "merge_method": "ties",
            "base_model": "base",
            "models": [{"model": "a", "parameters": {"lambda": 2.0}}, {"model": "b", "lambda": 3.0}],
            "parameters": {"lambda": 0.7, "int8_mask": True},
            "layers": [{"match": "mlp", "lambda": 0.5}],
        },
        "recipe",
    )
    assert recipe.parameters == {"scale": 0.7, "density": 1.0}, "mergekit keeps all by default"
    assert [entry.parameters for entry in recipe.models] == [{"scale": 2.0}, {"scale": 3.0}]
    assert recipe.layers[0].parameters == {"scale": 0.5}


def test_lambda_in_slices() -> None:
    sources = [{"model": "a", "layer_range": [0, 1]}]
    recipe = Recipe.read({"slices": [{"sources": sources, "parameters": {"lambda": 0.7}}]}, "recipe")
    assert recipe.slices[0].parameters == {"scale": 0.7}


def test_both_names_are_an_error() -> None:
    with pytest.raises(UserError, match="one option"):
        Recipe.read({"models": ["a"], "parameters": {"lambda": 0.7, "scale": 0.5}}, "recipe")
