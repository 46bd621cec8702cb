"""Which numbers of a recipe a search changes, and that its recipe is what was measured."""

from pathlib import Path
from typing import Any

import pytest
from model_family import family  # noqa: F401

from posttrain.merge.api import merge, planned_merge
from posttrain.merge.methods.registry import METHODS, load_method
from posttrain.merge.recipe import Recipe
from posttrain.store.errors import UserError
from posttrain.tune.merges.search_space import search_space, with_values


def recipe(**values: Any) -> Recipe:
    return Recipe.read({"models": ["a", "b"], "base": "base", **values}, "test")


def space(**values: Any) -> dict[str, tuple[float, float, float]]:
    searched, point = search_space(recipe(**values))
    return {name: (entry.low, entry.high, point[name]) for name, entry in searched.parameters.items()}  # type: ignore[attr-defined]


def test_weights_and_options_with_two_bounds_are_searched() -> None:
    assert space(method="slerp") == {"t": (0.0, 1.0, 0.5)}
    assert space(method="linear") == {"weight 1": (0.01, 1.0, 1.0), "weight 2": (0.01, 1.0, 1.0)}
    # The scale does what weights do that are not normalised.
    plain = space(method="task_arithmetic", parameters={"weight": [0.3, 0.4]})
    assert plain == {"weight 1": (0.0, 1.0, 0.3), "weight 2": (0.0, 1.0, 0.4)}
    assert space(method="ties").keys() == {"weight 1", "weight 2", "density", "scale"}
    assert space(method="ties")["density"] == (0.05, 1.0, 0.2)
    assert "scale" not in space(method="ties", parameters={"normalize": False})
    own = space(method="ties", models=[{"model": "a", "weight": 0.2}, "b"], parameters={"weight": 0.5})
    assert (own["weight 1"][2], own["weight 2"][2]) == (0.2, 0.5)
    # What is given by layers is left as it is.
    assert "density" not in space(method="ties", parameters={"density": [0.1, 0.9]})
    assert "density" not in space(method="ties", layers=[{"match": "mlp", "density": 0.5}])


def test_the_start_of_every_methods_variables_is_in_their_range() -> None:
    searched = 0
    for name in set(METHODS) - {"passthrough", "mixture_of_experts"}:
        low, high = load_method(name).models
        models = ["a", "b", "c"][: max(low, min(2, high or 2))]
        for least, most, start in space(method=name, models=models).values():
            assert least <= start <= most, name
            searched += 1
    assert searched > 30


def test_a_space_of_ones_own() -> None:
    search = {"space": {"scale": [0.5, 1.5], "weight": [-1, 1]}}
    assert space(method="task_arithmetic", search=search) == {
        "weight 1": (-1.0, 1.0, 1.0),
        "weight 2": (-1.0, 1.0, 1.0),
        "scale": (0.5, 1.5, 1.0),
    }


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"method": "ties", "search": {"space": {"densty": [0, 1]}}}, "did you mean `density`"),
        ({"method": "ties", "search": {"space": {"density": [0, 2]}}}, "density lies between 0 and 1"),
        ({"method": "ties", "search": {"space": {"density": [0.5, 0.5]}}}, "search.space.density"),
        ({"method": "ties", "search": {"space": {"election": [0, 1]}}}, "`election` is not a number"),
        (
            {"method": "ties", "search": {"space": {"density": [0, 1]}}, "parameters": {"density": [0.1, 0.9]}},
            "`density` is given by layers",
        ),
        ({"method": "passthrough"}, "passthrough has no number to search here"),
    ],
)
def test_a_wrong_space_is_named(values: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        search_space(recipe(**values))


def test_an_unknown_key_of_the_search_is_named() -> None:
    with pytest.raises(UserError, match=r"unknown key `search\.samplr`; did you mean `search\.sampler`"):
        recipe(search={"samplr": "gp"})


def test_a_recipe_that_must_be_searched_is_not_merged_as_it_is(family: Path, tmp_path: Path) -> None:  # noqa: F811
    with pytest.raises(UserError, match="search: is done by `posttrain merge`"):
        merge({"models": ["a", "b"], "search": {"trials": 3}}, tmp_path / "out", root=family)
    assert not (tmp_path / "out").exists()


def test_a_trials_recipe_has_its_numbers_in_every_tensor(family: Path, tmp_path: Path) -> None:  # noqa: F811
    given = Recipe.read(
        {
            "method": "ties",
            "base": "base",
            "models": [{"model": "a", "density": 0.9, "weight": 0.1}, "base", "b"],
            "parameters": {"weight": 0.5, "normalize": True},
            "search": {"trials": 3},
        },
        "test",
    )
    values = {"weight 1": 0.25, "weight 2": 0.75, "density": 0.4, "scale": 1.5}
    assert list(search_space(given)[0].parameters) == list(values)
    changed = with_values(given, values)
    assert changed.search is None
    with planned_merge(changed, family, tmp_path) as (plan, _):
        for tensor in plan.tensors:
            assert tensor.options["weight"] == (0.25, 0.75)
            assert tensor.options["density"] == (0.4, 0.4)
            assert tensor.options["scale"] == 1.5
            assert tensor.options["normalize"] is True
