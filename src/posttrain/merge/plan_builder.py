"""Builds the plan of a merge from a recipe and the opened models."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from posttrain.merge.methods.base import MergeMethod
from posttrain.merge.methods.registry import load_method
from posttrain.merge.plan import (
    DERIVED,
    DTYPES,
    EXTRACT_LORA,
    LOW_RANK_OPTIONS,
    MergePlan,
    Sources,
    TensorPlan,
    check_result,
    common_shape,
    number_name,
    template_key,
    tensor_input,
    tensor_names,
    writes_adapter,
)
from posttrain.merge.recipe import AUTO, LayerRule, ModelEntry, Position, Recipe, Slice, Value, resolve
from posttrain.merge.result_config import stacked_changes
from posttrain.merge.sources import HEAD, LAYER, WeightSource, embedding_of, layer_of
from posttrain.store.errors import UserError


def build_plan(recipe: Recipe, sources: Sources, tokenizer: tuple[Path, WeightSource] | None = None) -> MergePlan:
    """Plans a merge and checks that it makes sense.

    Args:
        recipe: the recipe.
        sources: its models and base, opened, with their rows of tokens matched.
        tokenizer: folder of the result's tokenizer, and the model whose special tokens it has; the template's by
            default.

    Raises:
        UserError: the models do not fit each other, a tensor would be lost, or an option is wrong.
    """
    template = sources[template_key(recipe)]
    tokenizer = tokenizer or (template.tokenizer_folder, template)
    check_result(recipe, template)
    if recipe.slices:
        return _Stack(recipe, sources).plan(template, tokenizer)
    entries = _order(recipe.models, recipe.base, recipe.method)
    builder = _Builder(recipe, sources, entries, recipe.base, recipe.method, {})
    names = tensor_names([*builder.models, *([builder.base] if builder.base else [])])
    layers = 1 + max((number for name in names if (number := layer_of(name)) is not None), default=-1)
    tensors = [builder.tensor(name, dict.fromkeys(range(len(entries)), name), name, layers) for name in names]
    changes = _config_changes(template, tensors)
    if writes_adapter(recipe) and (size := changes.get("vocab_size", 0)) > template.config.get("vocab_size", size):
        raise UserError(
            f"the result has {size} tokens, and an adapter adds none to the base", where="tokenizer", fix="base"
        )
    return MergePlan(recipe, tensors, list(sources.values()), template, *tokenizer, config_changes=changes)


def _in_layer(name: str, layer: int) -> str:
    """Returns the name that the tensor has in another layer."""
    match = LAYER.search(name)
    return name if match is None else f"{name[: match.start(1)]}{layer}{name[match.end(1) :]}"


def _order(entries: Sequence[ModelEntry], base: str | None, method: str) -> list[ModelEntry]:
    """Returns the models to merge: without the base for task vectors; else with the base first, if it is one of two."""
    others = [entry for entry in entries if entry.model != base or entry.adapter]
    if load_method(method).task_vectors:
        return others
    own = [entry for entry in entries if entry.model == base and not entry.adapter]
    if base is not None and load_method(method).models == (2, 2):
        # SLERP of a base and one more, as mergekit has it: t = 0 is the base.
        return [*(own or [ModelEntry(model=base)]), *others]
    return list(entries)


class _Builder:
    """Plans tensors of one set of models."""

    def __init__(
        self,
        recipe: Recipe,
        sources: Sources,
        entries: Sequence[ModelEntry],
        base: str | None,
        method: str,
        parameters: Mapping[str, Value],
    ) -> None:
        self.recipe, self.entries, self.method = recipe, list(entries), method
        self.parameters = dict(recipe.parameters) | dict(parameters)
        self.models = [sources[entry.model, entry.adapter] for entry in entries]
        spec = load_method(method)
        if spec.task_vectors and base is None:
            raise UserError(
                f"{method} merges task vectors and needs the model that all were trained from", where="base"
            )
        if not self.models:
            raise UserError("there is no model besides the base", where="models")
        spec.check_models(len(self.models))
        given = [self.parameters, *(part.parameters for part in self.entries)]
        given += [rule.parameters for rule in recipe.layers]
        spec.check_needs([option for options in given for option in options], "method")
        self.base = sources[base, None] if base is not None else None
        for entry in self.entries:
            for option in entry.parameters:
                self._check_option(option, f"models.{entry.model}")
        for option in self.parameters:
            self._check_option(option, "parameters")

    def _check_option(self, option: str, where: str) -> None:
        methods = {self.method, *(rule.method for rule in self.recipe.layers if rule.method)}
        methods |= {part.method for part in self.recipe.slices if part.method}
        if self.recipe.as_adapter and option in LOW_RANK_OPTIONS and load_method(self.method).result == "model":
            return
        if not any(option in load_method(name).options for name in methods):
            load_method(self.method).check_name(option, where)

    def tensor(self, name: str, inputs: Mapping[int, str], base_name: str, layers: int) -> TensorPlan:
        """Plans one tensor.

        Args:
            name: its name in the result.
            inputs: its name in each model.
            base_name: its name in the base.
            layers: number of layers of the result, for interpolated options.
        """
        layer = layer_of(name)
        position = Position(name, None if layer is None else layer / max(layers - 1, 1))
        rule = next((rule for rule in self.recipe.layers if re.search(rule.match, name)), None)
        method = load_method(rule.method if rule and rule.method else self.method, "layers.method")
        method.check_models(len(self.models))
        entries = [tensor_input(source, inputs[number]) for number, source in enumerate(self.models)]
        base = tensor_input(self.base, base_name) if self.base is not None and method.task_vectors else None
        if method.task_vectors and base is None:
            raise UserError(f"{method.name} merges task vectors and needs a base", where="base")
        shape = common_shape(name, [*entries, *([base] if base else [])])
        first = base or entries[0]
        dtype = first.source.stored_dtype(first.tensor)
        for entry in entries:
            other = entry.source.stored_dtype(entry.tensor)
            if other != dtype and not (other.is_floating_point and dtype.is_floating_point):
                raise UserError(
                    f"tensor {name} holds {number_name(other)} in `{entry.source.name}` and {number_name(dtype)} in "
                    f"`{first.source.name}`",
                    where="models",
                    fix="they cannot be merged",
                )
        if not dtype.is_floating_point:
            return TensorPlan(name, shape, dtype, tuple(entries), None, None, {})
        options = self._options(method, name, position, rule)
        low_rank = None
        if writes_adapter(self.recipe):
            spec = load_method(method.name if method.result == "adapter" else EXTRACT_LORA)
            defaults = {option: parameter.default for option, parameter in spec.options.items()}
            values = defaults | self._options(spec, name, position, rule)
            low_rank = {option: values[option] for option in LOW_RANK_OPTIONS if option in values}
        result = DTYPES[self.recipe.dtype] if self.recipe.dtype else dtype
        return TensorPlan(name, shape, result, tuple(entries), base, method, options, low_rank=low_rank)

    def _options(self, method: MergeMethod, name: str, position: Position, rule: LayerRule | None) -> dict[str, Any]:
        options: dict[str, Any] = {}
        for option in method.options:
            value = self._value(option, position, rule.parameters if rule else {})
            if option == "weight" and value == AUTO and self.recipe.has_auto_weights:
                options[option] = AUTO  # until the statistics are there
            elif value is not None:
                options[option] = method.read_option(option, value, len(self.models), f"{option} of {name}")
            elif isinstance(default := method.options[option].default, tuple):
                options[option] = default * len(self.models) if len(default) == 1 else default
        return options

    def _value(self, option: str, position: Position, rule: Mapping[str, Value]) -> Any:
        """Resolves an option for one tensor: from the rule, the models, the slice, or the recipe."""
        if (value := resolve_list(rule.get(option), position, option, f"layers.{option}")) is not None:
            return value
        common = resolve_list(self.parameters.get(option), position, option, option)
        own = [resolve(entry.parameters.get(option), position, f"models.{option}") for entry in self.entries]
        if all(value is None for value in own):
            return common
        missing = [entry.model for entry, value in zip(self.entries, own, strict=True) if value is None]
        if missing and (common is None or isinstance(common, list)):
            default = load_method(self.method).options[option].default
            common = default[0] if isinstance(default, tuple) and len(default) == 1 else common
            if common is None or isinstance(common, list):
                raise UserError(f"`{missing[0]}` has none", where=option, fix="give each model one")
        return [common if value is None else value for value in own]


def resolve_list(value: Value | None, position: Position, option: str, where: str) -> Any:
    """Resolves a value of the recipe or of a rule, where a list holds one weight per model (``weight: [0.3, 0.7]``)."""
    if option == "weight" and isinstance(value, list) and all(isinstance(item, int | float) for item in value):
        # mergekit has weights below the models alone, where a list means layers.
        return value
    return resolve(value, position, where)


class _Stack:
    """Plans a result whose layers are slices of the models'."""

    def __init__(self, recipe: Recipe, sources: Sources) -> None:
        self.recipe, self.sources = recipe, sources

    def plan(self, template: WeightSource, tokenizer: tuple[Path, WeightSource]) -> MergePlan:
        layers = sum(part.sources[0].layer_range[1] - part.sources[0].layer_range[0] for part in self.recipe.slices)
        tensors: list[TensorPlan] = []
        origins: list[tuple[WeightSource, int]] = []
        builders = [self._builder(part) for part in self.recipe.slices]
        first, last = builders[0], builders[-1]
        names = tensor_names(first.models)
        if HEAD not in names and any(HEAD in model.shapes() for model in last.models):
            names.append(HEAD)  # the first slice's models have tied embeddings
        outside = [name for name in names if layer_of(name) is None]
        behind = max((at for at, name in enumerate(names) if layer_of(name) is not None), default=-1)
        # What comes before the layers is the first slice's, and what comes after them the last one's.
        tail = {name for at, name in enumerate(names) if layer_of(name) is None and (at > behind or name == HEAD)}
        for name in outside:
            builder = last if name in tail else first
            tensors.append(builder.tensor(name, dict.fromkeys(range(len(builder.models)), name), name, layers))
        start = 0
        for part, builder in zip(self.recipe.slices, builders, strict=True):
            tensors += self._layers(part, builder, start, layers)
            low, high = part.sources[0].layer_range
            owner = self.sources[part.sources[0].model, part.sources[0].adapter]
            origins += [(owner, layer) for layer in range(low, high)]
            start += high - low
        changes = _config_changes(template, tensors) | stacked_changes(template, origins)
        return MergePlan(self.recipe, tensors, list(self.sources.values()), template, *tokenizer, layers, changes)

    def _builder(self, part: Slice) -> _Builder:
        method = part.method or self.recipe.method
        base = part.base or self.recipe.base
        entries = _order(part.sources, base, method)
        return _Builder(self.recipe, self.sources, entries, base, method, part.parameters)

    def _layers(self, part: Slice, builder: _Builder, start: int, layers: int) -> list[TensorPlan]:
        tensors = []
        low, high = part.sources[0].layer_range
        ranges = [entry.layer_range[0] if hasattr(entry, "layer_range") else low for entry in builder.entries]
        known: dict[int, list[str]] = {}
        for name in builder.models[0].shapes():
            if (layer := layer_of(name)) is not None and not DERIVED.search(name):
                known.setdefault(layer, []).append(name)
        for step in range(high - low):
            if ranges[0] + step not in known:
                raise UserError(
                    f"`{builder.entries[0].model}` has no layer {ranges[0] + step}",
                    where="slices",
                    fix=f"it has {len(known)} layers, from 0 on",
                )
            for name in known[ranges[0] + step]:
                inputs = {number: _in_layer(name, first + step) for number, first in enumerate(ranges)}
                result = _in_layer(name, start + step)
                tensors.append(builder.tensor(result, inputs, _in_layer(name, low + step), layers))
        return tensors


def _config_changes(template: WeightSource, tensors: Sequence[TensorPlan]) -> dict[str, Any]:
    shapes = {tensor.name: tensor.shape for tensor in tensors}
    changes: dict[str, Any] = {"tie_word_embeddings": False} if HEAD in shapes else {}
    embedding = embedding_of(shapes)
    if embedding is not None and "vocab_size" in template.config:
        changes["vocab_size"] = shapes[embedding][0]
    return changes
