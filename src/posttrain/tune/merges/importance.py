"""Measures the importance of every model's layers and heads, and writes it into a recipe."""

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from posttrain.evaluate.paired_interval import Interval, paired_interval
from posttrain.merge.output_folder import scratch_folder
from posttrain.merge.plan_statistics import examples_as_trained
from posttrain.merge.recipe import LayerRule, Recipe
from posttrain.merge.statistics import Example
from posttrain.models.importance import Importance, importance_by_gradient
from posttrain.models.language_model import load_language_model
from posttrain.models.likelihood import context_length
from posttrain.models.task import TaskConfig, trained_task
from posttrain.store.errors import UserError
from posttrain.store.paths import locate_path
from posttrain.tune.merges.data import read_examples, with_data
from posttrain.tune.merges.suites import local_models

_RESAMPLES = 2000


@dataclass(frozen=True)
class ModelImportance:
    """The importance of one model's layers and heads, in nats of loss per token.

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
    recipe: Recipe, root: Path, files: Sequence[str], parent: Path | None = None
) -> tuple[Recipe, list[ModelImportance]]:
    """Measures the importance of the layers and heads of every model of a recipe for `by_importance`.

    Args:
        recipe: the recipe.
        root: the folder that the paths of its models are relative to.
        files: the records, as `read_data` takes them.
        parent: the folder in which temporary models may lie, such as adapters that are merged into their models; the
            system's for temporary files by default.

    Returns:
        The recipe with rules for each layer, and the importances.

    Raises:
        UserError: a model or a record cannot be used.
    """
    for key, used in (("slices", recipe.slices), ("align", recipe.align != "none")):
        if used:
            raise UserError("importance is measured of whole models as they are", where=key, fix="leave it out")
    data = read_data(recipe, files, root)
    with scratch_folder(parent or Path(tempfile.gettempdir())) as scratch:
        folders = local_models(recipe, root, scratch)
        keys = [(entry.model, entry.adapter) for entry in recipe.models]
        names = ["+".join(filter(None, key)) for key in keys]
        importances = [
            measure_importance(folders[key], name, examples, recipe.seed)
            for key, name, examples in zip(keys, names, data, strict=True)
        ]
    return with_importances(recipe, importances), importances


def measure_importance(folder: Path, name: str, examples: Sequence[Example], seed: int = 0) -> ModelImportance:
    """Measures the importance of a model's layers and heads in one pass over the records, to first order.

    Raises:
        UserError: the model's layers or heads are not known, or no record fits its context.
    """
    lm = load_language_model(folder, TaskConfig(), "float32")
    encoded = [lm.encode(prompt, answer) for prompt, answer in examples]
    fitting = [example for example in encoded if len(example.ids) <= context_length(lm)]
    if not fitting:
        raise UserError("no record fits the model's context", where="--data", fix="give shorter records")
    return _summary(name, importance_by_gradient(lm, fitting), seed)


def read_data(recipe: Recipe, files: Sequence[str], root: Path | None = None) -> list[Sequence[Example]]:
    """Reads the records that each model of a recipe is measured on, under the task that it was trained for.

    Args:
        recipe: the recipe; its seed draws as many records as its key ``statistics`` says.
        files: one file for all models, or one per model; paths are relative to the current folder.
        root: the folder that the paths of the models are relative to; the current one by default.

    Returns:
        A list a model, the same list where models share a file and a task.

    Raises:
        UserError: there are neither one file nor as many as models, or a file cannot be used.
    """
    named = with_data(recipe, files)
    examples = read_examples(named, Path())
    folders = [locate_path(root or Path(), entry.adapter or entry.model) for entry in named.models]
    tasks = [trained_task(folder) or TaskConfig() for folder in folders]
    return examples_as_trained(examples, [entry.data or named.data or "" for entry in named.models], tasks)


def with_importances(recipe: Recipe, importances: Sequence[ModelImportance]) -> Recipe:
    """Returns the recipe with two rules for each layer, behind its own: the importances of heads and of the layer.

    Negative ones, of parts without which the loss falls, count as 0.
    """
    rules = []
    for layer in range(len(importances[0].layers)):
        weight = [_value(model.layers[layer]) for model in importances]
        heads = [[_value(interval) for interval in model.heads[layer]] for model in importances]
        match = rf"\.layers\.{layer}\."
        attention = {"weight": weight, "importance": heads}
        rules.append(LayerRule.model_validate({"match": rf"{match}self_attn\.", "parameters": attention}))
        rules.append(LayerRule.model_validate({"match": match, "parameters": {"weight": weight}}))
    return recipe.model_copy(update={"layers": [*recipe.layers, *rules]})


def _summary(name: str, importance: Importance, seed: int) -> ModelImportance:
    records = len(importance.tokens)
    # In nats per token, so that the mean over records is the sum of changes by the sum of tokens.
    scale = records / importance.tokens.sum()

    def interval(changes: np.ndarray) -> Interval:
        return paired_interval(scale * changes, np.zeros(records), seed=seed, resamples=_RESAMPLES)

    layers = [interval(changes) for changes in importance.layers.T]
    heads = [[interval(changes) for changes in by_head.T] for by_head in importance.heads.transpose(1, 0, 2)]
    return ModelImportance(name, layers, heads, records)


def _value(interval: Interval) -> float:
    return float(f"{max(0.0, interval.difference):.6g}")


def _numbers(interval: Interval) -> list[float]:
    return [interval.difference, interval.low, interval.high]
