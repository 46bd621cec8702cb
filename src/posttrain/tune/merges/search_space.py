"""The space of a merge's search: the models' weights, and the method's options with a range."""

import math
from collections.abc import Mapping
from typing import Any

from posttrain.merge.methods.base import MergeMethod, PerModel, Range
from posttrain.merge.methods.registry import load_method
from posttrain.merge.recipe import ModelEntry, Recipe
from posttrain.store.errors import UserError
from posttrain.tune.parameters import Float
from posttrain.tune.space import Space

_SCALE = (0.0, 2.0)

_LEAST_WEIGHT = 0.01  # of weights that are divided by their sum, which must not be zero

_LEAST_DENSITY = 0.05  # with density 0 nothing is left of a model

_WHERE = "search.space"


def search_space(recipe: Recipe) -> tuple[Space, dict[str, float]]:
    """Returns the space of a recipe's search, and the recipe's own point in it.

    Without ``search.space`` it has the weight of each model, from 0 to 1; every number of the method with two bounds,
    such as ``density`` and ``t``; and ``scale`` from 0 to 2 where weights are normalised, as it does otherwise what the
    weights do. What the recipe gives as a list by layers, or by rules, is left as it is.

    Raises:
        UserError: the method has no such option, or it is not a number; a range is empty or beyond the option's.
    """
    if recipe.slices:
        raise UserError("searches whole models", where="search", fix="leave out the slices")
    method = load_method(recipe.method)
    chosen = recipe.search.space if recipe.search else {}
    for name, bounds in chosen.items():
        _check_range(method, name, bounds)
    ranges: dict[str, Float] = {}
    point: dict[str, float] = {}
    for name, (low, high) in (chosen or _default_ranges(recipe, method)).items():
        starts = _starts(recipe, method, name)
        if starts is None and chosen:
            raise UserError(f"`{name}` is given by layers", where=_WHERE, fix="give one number, or leave it out")
        by_model = name == "weight" and starts is not None and len(starts) > 1
        for number, start in enumerate(starts or (), 1):
            variable = f"{name} {number}" if by_model else name
            ranges.setdefault(variable, Float(low, high))
            point.setdefault(variable, min(max(start, low), high))
    if not ranges:
        raise UserError(f"{recipe.method} has no number to search here", where="search", fix="name one in search.space")
    return Space(ranges, where=_WHERE), point


def with_values(recipe: Recipe, values: Mapping[str, float]) -> Recipe:
    """Returns the recipe with a trial's numbers, and without its search.

    Args:
        recipe: the recipe.
        values: the numbers, by their names in the space.
    """
    changed = recipe.model_dump(exclude_unset=True, exclude={"search"})
    parameters = dict(recipe.parameters)
    weights = {int(name.split()[1]): value for name, value in values.items() if name.startswith("weight ")}
    own = {name: value for name, value in values.items() if not name.startswith("weight ")}
    members = {id(entry): number for number, entry in enumerate(_members(recipe, load_method(recipe.method)), 1)}
    models: list[dict[str, Any]] = []
    for entry in recipe.models:
        options = {key: value for key, value in entry.parameters.items() if key not in own}
        if weights and id(entry) in members:
            options["weight"] = weights[members[id(entry)]]
        models.append({"model": entry.model, "adapter": entry.adapter, "parameters": options})
    if weights:
        parameters.pop("weight", None)
    return Recipe.read(changed | {"models": models, "parameters": parameters | own}, "search")


def _members(recipe: Recipe, method: MergeMethod) -> list[ModelEntry]:
    """Returns the models that have a weight: the base has none where it gives the task vectors."""
    return [e for e in recipe.models if not (method.task_vectors and e.model == recipe.base and not e.adapter)]


def _is_number(method: MergeMethod, name: str) -> bool:
    return method.options[name].annotation in (float, PerModel)


def _check_range(method: MergeMethod, name: str, bounds: tuple[float, float]) -> None:
    method.check_name(name, _WHERE)
    if not _is_number(method, name):
        raise UserError(f"`{name}` is not a number", where=_WHERE, fix="remove it")
    allowed = method.ranges.get(name, Range())
    if bounds[0] not in allowed or bounds[1] not in allowed:
        raise UserError(f"{name} lies between {allowed.low:g} and {allowed.high:g}", where=_WHERE)


def _default_ranges(recipe: Recipe, method: MergeMethod) -> dict[str, tuple[float, float]]:
    """Returns the ranges of the options that are searched unless the recipe names others."""
    options = method.options
    bounded = {name: method.ranges[name] for name in options if name in method.ranges and _is_number(method, name)}
    # A limit of rounding changes no result worth measuring.
    bounded.pop("linear_above", None)
    ranges = {name: (r.low, r.high) for name, r in bounded.items() if math.isfinite(r.low) and math.isfinite(r.high)}
    if "density" in ranges:
        ranges["density"] = (max(ranges["density"][0], _LEAST_DENSITY), ranges["density"][1])
    if "weight" not in options:
        return ranges
    default = options["normalize"].default if "normalize" in options else True
    normalized = recipe.parameters.get("normalize", default)
    weight = (_LEAST_WEIGHT if normalized or not method.task_vectors else 0.0, 1.0)
    return {"weight": weight} | ranges | ({"scale": _SCALE} if normalized and "scale" in options else {})


def _starts(recipe: Recipe, method: MergeMethod, name: str) -> list[float] | None:
    """Returns the option's value for each model as the recipe has it; None where it is given by layers or rules."""
    if any(name in rule.parameters for rule in recipe.layers):
        return None
    entries, common = _members(recipe, method), recipe.parameters.get(name)
    if isinstance(common, list):
        if name != "weight" or len(common) != len(entries):
            return None
        shared: list[Any] = list(common)
    else:
        default = method.options[name].default
        default = default[0] if isinstance(default, tuple) else default
        shared = [default if common is None else common] * len(entries)
    values = [entry.parameters.get(name, value) for entry, value in zip(entries, shared, strict=True)]
    numbers = all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)
    return [float(value) for value in values] if numbers else None
