"""The numbers of a recipe that a search changes: the models' weights, and the method's options with a range."""

import math
from collections.abc import Mapping
from typing import Any

from posttrain.merge.methods.base import MergeMethod, PerModel, Range
from posttrain.merge.methods.registry import load_method
from posttrain.merge.recipe import ModelEntry, Recipe
from posttrain.merge.search import Variable
from posttrain.store.errors import UserError

_SCALE = (0.0, 2.0)

_LEAST_WEIGHT = 0.01  # of weights that are divided by their sum, which must not be zero

# Limits of an iteration and of rounding, which change no result worth measuring.
_NOT_SEARCHED = frozenset({"tol", "linear_above"})


def search_space(recipe: Recipe) -> list[Variable]:
    """Returns the variables of a recipe's search.

    Without ``search.space`` they are the weight of each model, from 0 to 1; every number of the method with two bounds,
    such as ``density`` and ``t``; and ``scale`` from 0 to 2 where weights are normalised, as it does otherwise what the
    weights do. What the recipe gives as a list by layers, or by rules, is left as it is.

    Raises:
        UserError: the method has no such option, or it is no number; a range is empty or beyond the option's.
    """
    method = load_method(recipe.method)
    space = dict(recipe.search.space) if recipe.search and recipe.search.space else None
    entries = _entries(recipe, method)
    where = "search.space"
    for name in space or {}:
        method.check_name(name, where)
        if not _is_number(method, name):
            raise UserError(f"`{name}` is no number", where=where, fix="remove it")
    variables: list[Variable] = []
    for name in method.options:
        bounds = (space or {}).get(name) or (None if space is not None else _default_range(recipe, method, name))
        if bounds is None or not _is_number(method, name):
            continue
        _check_range(name, bounds, method.ranges.get(name, Range()), where)
        starts = _starts(recipe, method, entries, name)
        if starts is None:
            if space is None:
                continue
            raise UserError(f"`{name}` is given by layers", where=where, fix="give one number, or leave it out")
        low, high = bounds
        if name == "weight" and len(entries) > 1:
            variables += [
                Variable(f"weight {number}", low, high, _clip(start, low, high))
                for number, start in enumerate(starts, 1)
            ]
        else:
            variables.append(Variable(name, low, high, _clip(starts[0], low, high)))
    if not variables:
        raise UserError(f"{recipe.method} has no number to search here", where="search", fix="name one in search.space")
    return variables


def with_values(recipe: Recipe, values: Mapping[str, float]) -> Recipe:
    """Returns the recipe with a trial's numbers, and without its search.

    Args:
        recipe: the recipe.
        values: the numbers, by the variables' names.
    """
    method = load_method(recipe.method)
    changed = recipe.model_dump(exclude_unset=True)
    changed.pop("search", None)
    own = [name for name in values if not name.startswith("weight ")]
    parameters = dict(recipe.parameters)
    weights = {int(name.split()[1]): value for name, value in values.items() if name.startswith("weight ")}
    members = {id(entry): number for number, entry in enumerate(_entries(recipe, method), 1)}
    models: list[dict[str, Any]] = []
    for entry in recipe.models:
        options = {key: value for key, value in entry.parameters.items() if key not in own}
        if weights and id(entry) in members:
            options["weight"] = weights[members[id(entry)]]
        models.append({"model": entry.model, "adapter": entry.adapter, "parameters": options})
    if weights:
        parameters.pop("weight", None)
    parameters |= {name: values[name] for name in own}
    return Recipe.read(changed | {"models": models, "parameters": parameters}, "search")


def _entries(recipe: Recipe, method: MergeMethod) -> list[ModelEntry]:
    """Returns the models that have a weight: the base has none where it gives the task vectors."""
    if recipe.slices:
        raise UserError("searches whole models", where="search", fix="leave out the slices")
    return [e for e in recipe.models if not (method.task_vectors and e.model == recipe.base and not e.adapter)]


def _is_number(method: MergeMethod, name: str) -> bool:
    annotation = method.options[name].annotation
    return annotation in (float, PerModel, float | None, PerModel | None)


def _default_range(recipe: Recipe, method: MergeMethod, name: str) -> tuple[float, float] | None:
    if name in _NOT_SEARCHED:
        return None
    normalized = recipe.parameters.get("normalize", method.options["normalize"].default if _has(method) else True)
    if name == "weight":
        return (_LEAST_WEIGHT if normalized or not method.task_vectors else 0.0), 1.0
    if name == "scale" and "weight" in method.options:
        return _SCALE if normalized else None
    bounds = method.ranges.get(name, Range())
    if name == "density" and math.isfinite(bounds.high):
        return max(bounds.low, 0.05), bounds.high  # with density 0 nothing is left of a model
    return (bounds.low, bounds.high) if math.isfinite(bounds.low) and math.isfinite(bounds.high) else None


def _has(method: MergeMethod) -> bool:
    return "normalize" in method.options


def _starts(recipe: Recipe, method: MergeMethod, entries: list[ModelEntry], name: str) -> list[float] | None:
    """Returns the option's value for each model as the recipe has it; None where it is given by layers or rules."""
    if any(name in rule.parameters for rule in recipe.layers):
        return None
    common = recipe.parameters.get(name)
    if isinstance(common, list):
        if name != "weight" or len(common) != len(entries):
            return None
        shared: list[Any] = list(common)
    else:
        default = method.options[name].default
        default = default[0] if isinstance(default, tuple) else default
        shared = [default if common is None else common] * len(entries)
    values = [entry.parameters.get(name, value) for entry, value in zip(entries, shared, strict=True)]
    # None: an option whose default the method computes, which has no number to start from.
    values = [0.0 if value is None else value for value in values]
    numbers = all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)
    return [float(value) for value in values] if numbers else None


def _check_range(name: str, bounds: tuple[float, float], allowed: Range, where: str) -> None:
    low, high = bounds
    if low >= high:
        raise UserError(f"{name}: from {low:g} to {high:g} is no range", where=where, fix="the greater number last")
    if low not in allowed or high not in allowed:
        raise UserError(f"{name} lies between {allowed.low:g} and {allowed.high:g}", where=where)


def _clip(value: float, low: float, high: float) -> float:
    return min(max(value, low), high)
