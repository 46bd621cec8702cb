"""The plan of a merge: which tensors of which models make each tensor of the result, checked before any work."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from posttrain.merge.lora_adapter import AdaptedModel
from posttrain.merge.methods.base import MergeMethod
from posttrain.merge.methods.registry import load_method
from posttrain.merge.recipe import Recipe
from posttrain.merge.sources import HEAD, WeightSource, embedding_of, has_tied_head, is_embedding
from posttrain.merge.tensor_reader import TensorInput
from posttrain.store.errors import UserError, shorten, suggest

# Computed from the config by transformers; old folders still hold it.
DERIVED = re.compile(r"rotary_emb\.inv_freq$")

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}

EXTRACT_LORA = "extract_lora"

LOW_RANK_OPTIONS = ("rank", "energy", "others")
"""Options of `extract_lora` that say how a task vector is written as an adapter."""


Sources = Mapping[tuple[str, str | None], WeightSource]
"""The opened models, by model and adapter as the recipe names them."""


@dataclass(frozen=True)
class TensorPlan:
    """One tensor of the result.

    Attributes:
        name: its name in the result.
        shape: its shape.
        dtype: its dtype in the result.
        inputs: the models' tensors, in the recipe's order.
        base: the base's, for methods on task vectors.
        method: None to copy the first input's bytes, as of a buffer of integers.
        options: the method's, as its signature has them; ``weight`` may be ``auto`` until the statistics are there.
        statistics: one per model, for methods that need them; empty if the models have none of this tensor.
        norms: of each model's statistics, over all its tensors; empty where ``statistics`` is.
        low_rank: `LOW_RANK_OPTIONS`, if the result is an adapter; without ``rank``, adapters are concatenated.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    inputs: tuple[TensorInput, ...]
    base: TensorInput | None
    method: MergeMethod | None
    options: Mapping[str, Any]
    statistics: tuple[TensorInput, ...] = ()
    norms: tuple[float, ...] = ()
    low_rank: Mapping[str, Any] | None = None

    @property
    def elements(self) -> int:
        """Returns the number of elements."""
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        """Returns the bytes that it takes in the result."""
        return self.elements * self.dtype.itemsize

    @property
    def bytes_read(self) -> int:
        """Returns the bytes that one pass over its inputs reads."""
        entries = [*self.inputs, *([self.base] if self.base else [])]
        return sum(self.elements * entry.source.dtype(entry.tensor).itemsize for entry in entries)


@dataclass(frozen=True)
class MergePlan:
    """A merge that can begin.

    Attributes:
        tensors: of the result, in its order.
        sources: every model that takes part, the base too.
        template: the model whose config the result gets.
        tokenizer: the folder whose tokenizer it gets.
        token_ids: the model whose numbers of special tokens it gets.
        layers: number of layers of the result, if slices changed it.
        statistics: what was computed on the models' data, for ``merge.json``.
    """

    recipe: Recipe
    tensors: Sequence[TensorPlan]
    sources: Sequence[WeightSource]
    template: WeightSource
    tokenizer: Path
    token_ids: WeightSource
    layers: int | None = None
    config_changes: Mapping[str, Any] = field(default_factory=dict)
    statistics: Sequence[Mapping[str, Any]] = ()

    @property
    def bytes(self) -> int:
        """Returns the bytes of the result's tensors; of an adapter, the most that they may take."""
        return sum(tensor.bytes if tensor.low_rank is None else _adapter_bytes(tensor) for tensor in self.tensors)

    @property
    def bytes_read(self) -> int:
        """Returns the bytes that one pass over all inputs reads."""
        return sum(tensor.bytes_read for tensor in self.tensors)


def template_key(recipe: Recipe) -> tuple[str, str | None]:
    """Returns the key of the model whose config the result gets: the base, or the first model."""
    first = recipe.slices[0] if recipe.slices else None
    base = (first.base if first else None) or recipe.base
    if base is not None:
        return base, None
    entry = first.sources[0] if first else recipe.models[0]
    return entry.model, entry.adapter


def writes_adapter(recipe: Recipe) -> bool:
    """Returns whether the result is a LoRA adapter on the base."""
    return recipe.as_adapter or load_method(recipe.method).result == "adapter"


def check_result(recipe: Recipe, template: WeightSource) -> None:
    """Checks that the recipe can give an adapter or a mixture of experts, if that is its result.

    Raises:
        UserError: methods of different results are mixed, an adapter is to hold no task vector, or the base is adapted.
    """
    result = load_method(recipe.method).result
    others = [*(rule.method for rule in recipe.layers), *(part.method for part in recipe.slices)]
    for other in filter(None, others):
        if "model" != load_method(other).result != result:
            raise UserError(f"{other} makes a whole result, not some layers", where="method", fix="name it alone")
    if not writes_adapter(recipe) and result == "model":
        return
    kind = "a mixture of experts" if result == "mixture" else "an adapter"
    for key, used in (("slices", recipe.slices), ("layers", recipe.layers and result == "mixture")):
        if used:
            raise UserError(f"a merge into {kind} has no `{key}`", where=key, fix="remove them")
    if writes_adapter(recipe) and not load_method(recipe.method).task_vectors:
        raise UserError(
            f"an adapter holds a task vector, and {recipe.method} merges whole weights",
            where="as_adapter",
            fix="choose a method with a base, such as task_arithmetic",
        )
    if recipe.base is not None and isinstance(template, AdaptedModel):
        raise UserError(f"the base of {kind} is an adapter itself", where="base", fix="merge it into its model first")


def _adapter_bytes(tensor: TensorPlan) -> int:
    """Returns the most bytes that a tensor takes in an adapter."""
    assert tensor.low_rank is not None
    whole = tensor.elements * tensor.dtype.itemsize
    if len(tensor.shape) != 2 or is_embedding(tensor.name):
        return whole
    rank = tensor.low_rank.get("rank")
    if rank is None:
        adapters = [entry.source for entry in tensor.inputs if isinstance(entry.source, AdaptedModel)]
        if any(adapter.holds_whole(tensor.name) for adapter in adapters):
            return whole
        rank = sum(len(factors[0]) for adapter in adapters if (factors := adapter.factors(tensor.name)))
    return min(rank, *tensor.shape) * sum(tensor.shape) * torch.float32.itemsize


def tensor_names(sources: Sequence[WeightSource]) -> list[str]:
    """Returns the names of the result's tensors.

    Raises:
        UserError: a tensor is in one model and not in another.
    """
    names: dict[str, WeightSource] = {}
    for source in sources:
        for name in source.shapes():
            names.setdefault(name, source)
    for name, owner in list(names.items()):
        for source in sources:
            if name in source.shapes() or (name == HEAD and has_tied_head(source)):
                continue
            if DERIVED.search(name):
                names.pop(name, None)
                continue
            raise UserError(
                f"tensor {shorten(name)} is in `{owner.name}` and not in `{source.name}`",
                where="models",
                fix="only models with the same tensors merge",
            )
    if not names:
        raise UserError("holds no tensors", where=sources[0].name, fix="use an undamaged model")
    return list(names)


def tensor_input(source: WeightSource, name: str) -> TensorInput:
    """Returns a model's tensor; for the head of a model with tied embeddings, the embedding.

    Raises:
        UserError: it has none of this name.
    """
    if name not in source.shapes() and name == HEAD and (embedding := embedding_of(source.shapes())):
        return TensorInput(source, embedding)
    if name not in source.shapes():
        raise UserError(f"has no tensor {name}", where=source.name, fix=suggest(name, source.shapes()))
    return TensorInput(source, name)


def number_name(dtype: torch.dtype) -> str:
    """Returns the name of a dtype for messages."""
    return str(dtype).removeprefix("torch.")


def common_shape(name: str, inputs: Sequence[TensorInput]) -> tuple[int, ...]:
    """Returns the shape that a tensor has in all models.

    Raises:
        UserError: two models differ in it.
    """
    shapes = [entry.source.shapes()[entry.tensor] for entry in inputs]
    for entry, shape in zip(inputs[1:], shapes[1:], strict=True):
        if shape != shapes[0]:
            raise UserError(
                f"tensor {name} has the shape {list(shape)} in `{entry.source.name}` and {list(shapes[0])} in "
                f"`{inputs[0].source.name}`",
                where="models",
                fix="only models with the same shapes merge",
            )
    return shapes[0]
