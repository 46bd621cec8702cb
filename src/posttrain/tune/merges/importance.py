"""Measures the importance of every model's layers and heads, and writes it into a recipe."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from posttrain.evaluate.bootstrap import Interval, paired_bootstrap
from posttrain.merge.engine import MEMORY
from posttrain.merge.recipe import LayerRule, Recipe
from posttrain.merge.statistics import Example
from posttrain.models.importance import Importance, importance_by_ablation, importance_by_gradient
from posttrain.tune.merges.points import MergePoints, encode_examples, merge_points, read_data

_RESAMPLES = 2000


@dataclass(frozen=True)
class ModelImportance:
    """The importance of one model's layers and heads, in nats of loss a token.

    Attributes:
        name: the model's.
        layers: by layer, the mean over the records and its interval.
        heads: by layer and query head.
        records: number of records.
    """

    name: str
    layers: Sequence[Interval]
    heads: Sequence[Sequence[Interval]]
    records: int

    def to_dict(self) -> dict[str, Any]:
        """Returns the numbers as JSON has them."""
        return {
            "model": self.name,
            "records": self.records,
            "layers": [_numbers(interval) for interval in self.layers],
            "heads": [[_numbers(interval) for interval in heads] for heads in self.heads],
        }


def measured_recipe(
    recipe: Recipe,
    root: Path,
    files: Sequence[str],
    *,
    by_gradient: bool = True,
    memory: int = MEMORY,
    parent: Path | None = None,
) -> tuple[Recipe, list[ModelImportance]]:
    """Measures the importance of the layers and heads of every model of a recipe for `by_importance`.

    Args:
        recipe: the recipe.
        root: the folder that the paths of its models are relative to.
        files: the records, as `read_data` takes them.
        by_gradient: see `measure_importances`.
        memory: bytes of weights that a merge holds at once.
        parent: the folder in which models are written one by one; the system's for temporary files by default.

    Returns:
        The recipe with rules for each layer, and the importances.

    Raises:
        UserError: a model or a record cannot be used.
    """
    data = read_data(recipe, files, root)
    with merge_points(recipe, root, parent, memory) as points:
        importances = measure_importances(points, data, by_gradient=by_gradient, seed=recipe.seed)
    return with_importances(recipe, importances), importances


def measure_importances(
    points: MergePoints, data: Sequence[Sequence[Example]], *, by_gradient: bool = True, seed: int = 0
) -> list[ModelImportance]:
    """Measures the importance of the layers and heads of each model.

    Args:
        points: of the models.
        data: for each model the records that it is measured on.
        by_gradient: in one pass over the records, to first order; else by ablation, in a pass for each layer and head.
        seed: seed of the bootstrap.

    Raises:
        UserError: a model's layers or heads are not known, or no record fits its context.
    """
    measure = importance_by_gradient if by_gradient else importance_by_ablation
    results = []
    for number, (name, examples) in enumerate(zip(points.names, data, strict=True)):
        with points.model({number: 1.0}) as lm:
            results.append(_summary(name, measure(lm, encode_examples(lm, examples)), seed))
    return results


def with_importances(recipe: Recipe, importances: Sequence[ModelImportance]) -> Recipe:
    """Returns the recipe with two rules for each layer, behind its own: the importances of heads and of the layer.

    Negative ones, of parts without which the loss falls, count as 0.
    """
    rules = []
    for layer, weight in enumerate(layer_values(importances)):
        heads = [[_value(interval) for interval in model.heads[layer]] for model in importances]
        match = rf"\.layers\.{layer}\."
        attention = {"weight": weight, "importance": heads}
        rules.append(LayerRule.model_validate({"match": rf"{match}self_attn\.", "parameters": attention}))
        rules.append(LayerRule.model_validate({"match": match, "parameters": {"weight": weight}}))
    return recipe.model_copy(update={"layers": [*recipe.layers, *rules]})


def layer_values(importances: Sequence[ModelImportance]) -> list[list[float]]:
    """Returns for each layer its importance in each model, none of them below 0."""
    layers = range(len(importances[0].layers))
    return [[_value(model.layers[layer]) for model in importances] for layer in layers]


def _summary(name: str, importance: Importance, seed: int) -> ModelImportance:
    records = len(importance.tokens)
    # In nats a token, so that the mean over records is the sum of changes by the sum of tokens.
    scale = records / importance.tokens.sum()

    def interval(changes: np.ndarray) -> Interval:
        return paired_bootstrap(scale * changes, np.zeros(records), seed=seed, resamples=_RESAMPLES)

    layers = [interval(changes) for changes in importance.layers.T]
    heads = [[interval(changes) for changes in by_head.T] for by_head in importance.heads.transpose(1, 0, 2)]
    return ModelImportance(name, layers, heads, records)


def _value(interval: Interval) -> float:
    return float(f"{max(0.0, interval.difference):.6g}")


def _numbers(interval: Interval) -> list[float]:
    return [interval.difference, interval.low, interval.high]
