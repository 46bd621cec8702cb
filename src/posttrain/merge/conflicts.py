"""Measures how far models contradict each other before they are merged, and what each resolution keeps of them."""

import math
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from posttrain.merge.api import planned_merge
from posttrain.merge.engine import MEMORY, one_thread_each
from posttrain.merge.methods.ties import elect_and_add, keep_from
from posttrain.merge.plan import MergePlan, TensorPlan
from posttrain.merge.recipe import Recipe
from posttrain.merge.sources import layer_of
from posttrain.merge.tensor_group import Block, TensorGroup
from posttrain.merge.tensor_reader import Arena
from posttrain.store.progress import progress_bar

LARGE = 0.2
"""Share of a task vector's elements that count as large, tensor by tensor, as in TIES' paper."""

RESOLUTIONS = ("average", "zero", "magnitude", "ties")


@dataclass(frozen=True)
class TensorConflicts:
    """Sums over one tensor, or over several.

    Attributes:
        elements: number of elements.
        gram: inner products of the task vectors, float64 [models, models].
        opposed: number of elements whose signs oppose, int64 [models, models].
        opposed_weight: sum of sqrt(|a b|) over them, float64 [models, models].
        weight: the same over all elements.
        total: sum of |sum of task vectors|, and of the sums of their magnitudes.
        base: squared norm of the base.
        likeness: of each model's weights their inner product with the base's, their own squared norm and the base's,
            float64 [models, 3]; 0 for vectors, as norms are nearly alike in all models.
        kept: by resolution, the merged vector's inner product with each task vector, and its squared norm last.
    """

    elements: int
    gram: np.ndarray
    opposed: np.ndarray
    opposed_weight: np.ndarray
    weight: np.ndarray
    total: np.ndarray
    base: float
    likeness: np.ndarray
    kept: Mapping[str, np.ndarray]

    def __add__(self, other: "TensorConflicts") -> "TensorConflicts":
        return TensorConflicts(
            self.elements + other.elements,
            self.gram + other.gram,
            self.opposed + other.opposed,
            self.opposed_weight + other.opposed_weight,
            self.weight + other.weight,
            self.total + other.total,
            self.base + other.base,
            self.likeness + other.likeness,
            {name: self.kept[name] + other.kept[name] for name in RESOLUTIONS},
        )

    def cosine(self, first: int, second: int) -> float:
        """Returns the cosine between two task vectors; 0 if one is zero."""
        norm = math.sqrt(self.gram[first, first] * self.gram[second, second])
        return float(self.gram[first, second]) / norm if norm else 0.0

    def opposed_share(self, first: int, second: int) -> float:
        """Returns the share of the elements whose signs oppose; half, where the vectors have nothing in common."""
        return float(self.opposed[first, second]) / max(self.elements, 1)

    def opposed_weight_share(self, first: int, second: int) -> float:
        """Returns the same with each element weighted by the geometric mean of its magnitudes."""
        weight = float(self.weight[first, second])
        return float(self.opposed_weight[first, second]) / weight if weight else 0.0

    @property
    def interference(self) -> float:
        """Returns the share of the task vectors' magnitudes that cancels in their sum."""
        return 1.0 - float(self.total[0] / self.total[1]) if self.total[1] else 0.0

    def weight_cosine(self, model: int) -> float:
        """Returns the cosine between a model's weights and the base's; 1 for the base itself."""
        inner, own, base = self.likeness[model]
        return float(inner) / math.sqrt(own * base) if own * base > 0 else 1.0

    def norm_ratio(self, model: int) -> float:
        """Returns the norm of a task vector, by that of the base."""
        return math.sqrt(self.gram[model, model] / self.base) if self.base else math.inf

    def kept_share(self, resolution: str, model: int) -> float:
        """Returns the coefficient of a task vector in the merged one: 1 if it is kept whole, 0 if nothing is."""
        own = float(self.gram[model, model])
        return float(self.kept[resolution][model]) / own if own else 0.0


@dataclass(frozen=True)
class ConflictReport:
    """The conflicts between models, overall and by layer.

    Attributes:
        models: names.
        base: name of the base.
        overall: sums over all tensors.
        layers: sums by layer, in their order; the embeddings and the rest stand by name.
        aligned: whether the models' units were put in the order of the base's before.
    """

    models: Sequence[str]
    base: str
    overall: TensorConflicts
    layers: Mapping[str, TensorConflicts]
    aligned: bool = False

    @property
    def pairs(self) -> list[tuple[int, int]]:
        """Returns the pairs of models."""
        return list(combinations(range(len(self.models)), 2))

    def to_dict(self) -> dict[str, Any]:
        """Returns the numbers as JSON has them."""
        return {
            "models": list(self.models),
            "base": self.base,
            "overall": self._numbers(self.overall),
            "layers": {name: self._numbers(layer) for name, layer in self.layers.items()},
            "aligned": self.aligned,
        }

    def _numbers(self, sums: TensorConflicts) -> dict[str, Any]:
        return {
            "elements": sums.elements,
            "interference": sums.interference,
            "norm_ratio": [sums.norm_ratio(model) for model in range(len(self.models))],
            "weight_cosine": [sums.weight_cosine(model) for model in range(len(self.models))],
            "pairs": [
                {
                    "models": [self.models[first], self.models[second]],
                    "cosine": sums.cosine(first, second),
                    "opposed": sums.opposed_share(first, second),
                    "opposed_weight": sums.opposed_weight_share(first, second),
                }
                for first, second in self.pairs
            ],
            "kept": {name: [sums.kept_share(name, model) for model in range(len(self.models))] for name in RESOLUTIONS},
        }


def recipe_conflicts(recipe: Recipe, root: Path, memory: int = MEMORY, threads: int | None = None) -> ConflictReport:
    """Measures the conflicts between the models of a recipe; its method does not count.

    Args:
        recipe: the recipe, with a base and without slices.
        root: the folder that the paths of its models are relative to.
        memory: bytes of weights that are held at once.
        threads: that work side by side; one per core by default.

    Raises:
        UserError: a model cannot be read, or the models do not fit each other.
    """
    entries = [entry for entry in recipe.models if entry.model != recipe.base or entry.adapter]
    models = [{"model": entry.model, "adapter": entry.adapter} for entry in entries]
    values = {"base": recipe.base, "models": models, "align": recipe.align, "tokenizer": recipe.tokenizer}
    compared = Recipe.read(values | {"method": "task_arithmetic"}, "merge")
    with planned_merge(compared, root, Path(tempfile.gettempdir())) as (plan, _):
        return measure_conflicts(plan, memory, threads)


def measure_conflicts(plan: MergePlan, memory: int = MEMORY, threads: int | None = None) -> ConflictReport:
    """Measures the conflicts between the models of a plan.

    Args:
        plan: a merge of task vectors, such as task arithmetic.
        memory: bytes of weights that are held at once.
        threads: that work side by side; one per core by default.

    Raises:
        UserError: a weight is NaN or infinite.
    """
    tensors = [tensor for tensor in plan.tensors if tensor.method and tensor.base]
    count = threads or len(os.sched_getaffinity(0))
    with (
        one_thread_each(),
        progress_bar("measuring conflicts", sum(tensor.bytes for tensor in tensors) >> 20, "MiB") as advance,
        ThreadPoolExecutor(count, initializer=torch.set_num_threads, initargs=(1,)) as pool,
    ):
        # In the tensors' order, as the sums' last bits depend on it.
        futures = [pool.submit(_measure, tensor, memory // (count + 1)) for tensor in tensors]
        results = []
        for tensor, future in zip(tensors, futures, strict=True):
            results.append(future.result())
            advance(tensor.bytes >> 20)
    layers: dict[str, TensorConflicts] = {}
    for tensor, result in zip(tensors, results, strict=True):
        layer = layer_of(tensor.name)
        name = tensor.name.split(".")[-2] if layer is None else f"layer {layer}"
        layers[name] = layers[name] + result if name in layers else result
    overall, *others = results
    for other in others:
        overall += other
    first = tensors[0]
    assert first.base is not None
    names = [entry.source.name for entry in first.inputs]
    return ConflictReport(names, first.base.source.name, overall, layers, plan.recipe.align != "none")


def _measure(tensor: TensorPlan, memory: int) -> TensorConflicts:
    group = TensorGroup(tensor.name, tensor.inputs, tensor.base, Arena(memory), task_vectors=True)
    group.hold()
    models = group.models
    limits = group.kth_largest([LARGE] * models)
    resolutions: dict[str, Callable[[Tensor], Tensor]] = {
        "average": lambda values: values.mean(0),
        "zero": lambda values: values.mean(0).mul_(_agreement(values)),
        "magnitude": lambda values: torch.where(_agreement(values).bool(), values.mean(0), _largest(values)),
        "ties": lambda values: _trimmed(values, limits),
    }
    opposed = np.zeros((models, models), np.int64)
    weights = np.zeros((2, models, models))
    total, base, along = np.zeros(2), 0.0, np.zeros(models)
    gram = np.zeros((models, models))
    kept = {name: np.zeros(models + 1) for name in RESOLUTIONS}
    for block in group.blocks():
        values = block.values.flatten(1)
        gram += (values @ values.T).double().numpy()
        total += [float(values.sum(0).abs_().sum()), float(values.abs().sum())]
        base += float(_base(block).square().sum())
        along += (values @ _base(block).flatten()).double().numpy()
        for first, second in combinations(range(models), 2):
            product = (values[first] * values[second]).numpy()
            opposed[first, second] += np.count_nonzero(product < 0)
            magnitudes = np.sqrt(np.abs(product))
            weights[1, first, second] += magnitudes.sum(dtype=np.float64)
            weights[0, first, second] += magnitudes[product < 0].sum(dtype=np.float64)
        for name, resolve in resolutions.items():
            merged = resolve(values)
            kept[name] += [*(values @ merged).tolist(), float(merged.square().sum())]
    likeness = np.zeros((models, 3))
    if group.rows > 1:
        likeness = np.stack([base + along, base + 2 * along + gram.diagonal(), np.full(models, base)], axis=1)
    return TensorConflicts(
        group.elements,
        gram,
        opposed,
        weights[0],
        weights[1],
        total,
        base,
        likeness,
        kept,
    )


def _base(block: Block) -> Tensor:
    assert block.base is not None
    return block.base


def _agreement(values: Tensor) -> Tensor:
    """Returns 1 where no two models' signs oppose, else 0."""
    signs = values.sign()
    return (signs.amax(0) - signs.amin(0)).lt_(2)


def _largest(values: Tensor) -> Tensor:
    """Returns of each element the value of the largest magnitude; the first model's in a draw."""
    high, low = values.amax(0), values.amin(0)
    larger = torch.ge(high, -low).to(values.dtype)
    return high.mul_(larger).add_(low.mul_(1 - larger))


def _trimmed(values: Tensor, limits: Sequence[float]) -> Tensor:
    copy = values.clone()
    for row, limit in zip(copy, limits, strict=True):
        keep_from(row, limit)
    return elect_and_add(copy, (1.0,) * len(copy), "weighted", True)
