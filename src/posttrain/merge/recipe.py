"""The recipe of a merge: models, method and options, in our keys or in mergekit's."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, field_validator, model_validator

from posttrain.merge.config import SearchConfig
from posttrain.merge.methods.registry import METHODS
from posttrain.store.errors import UserError, suggest
from posttrain.store.section import Section
from posttrain.store.yaml_files import read_yaml

OutputType = Literal["bfloat16", "float16", "float32"]

Answers = Literal["data", "sampled"]
"""The answers that the Fisher information is of: the data's, or tokens drawn from the model."""

AUTO = "auto"
"""Option ``weight`` to have it computed from the models' scores and Fisher norms."""

Scalar = bool | int | float | str
Value = Scalar | list[Any]
"""A scalar; a list of numbers, interpolated over the layers; or a list of `Conditional` values."""

_OUR_KEYS = {"merge_method": "method", "base_model": "base", "tokenizer_source": "tokenizer", "out_dtype": "dtype"}

_OUR_OPTIONS = {"lambda": "scale"}

_MIXTURE = "mixture_of_experts"

_MIXTURE_OPTIONS = {"gate_mode": "gate", "experts_per_token": "experts_per_token"}  # beside mergekit-moe's `experts`

# Where mergekit's default is another one: a recipe of its must give its model.
_SPARSE = ("ties", "dare_linear", "dare_ties", "della", "della_linear")
_THEIR_DEFAULTS: dict[str, dict[str, Any]] = {name: {"density": 1.0} for name in _SPARSE}

_WITHOUT_EFFECT = {"name", "int8_mask", "rescale_norm"}  # int8_mask only says how mergekit keeps its masks


def _with_our_options(values: Any) -> Any:
    """Returns the options with our names for mergekit's, and without those that have no effect."""
    if not isinstance(values, Mapping):
        return values
    for theirs, ours in _OUR_OPTIONS.items():
        if theirs in values and ours in values:
            raise ValueError(f"`{theirs}` and `{ours}` are one option; remove one of them")
    return {_OUR_OPTIONS.get(key, key): value for key, value in values.items() if key not in _WITHOUT_EFFECT}


Options = Annotated[dict[str, Value], BeforeValidator(_with_our_options)]


class StatisticsOptions(Section):
    """How statistics of the models on their data are computed.

    Attributes:
        examples: most records of a file that count, drawn by the recipe's seed.
        answers: whose log-likelihood the Fisher information is of.
        columns: of the files, those of ``prompt`` and ``completion``, where their names do not tell.
    """

    examples: int = Field(default=256, ge=1)
    answers: Answers = "data"
    columns: dict[Literal["prompt", "completion"], str] = Field(default_factory=dict)


class ModelEntry(Section):
    """One model of a recipe, with options of its own.

    Attributes:
        data: a file of records of its task.
        positive_prompts: of an expert of a mixture: texts that belong to it.
        negative_prompts: texts that are not.
    """

    model: str = Field(min_length=1)
    adapter: str | None = None
    data: str | None = Field(default=None, min_length=1)
    positive_prompts: list[str] = Field(default_factory=list)
    negative_prompts: list[str] = Field(default_factory=list)
    parameters: Options = Field(default_factory=dict)

    @model_validator(mode="before")
    @classmethod
    def _read(cls, values: Any) -> Any:
        if isinstance(values, str):
            values = {"model": values}
        if not isinstance(values, Mapping):
            return values
        if "source_model" in values and "model" not in values:
            values = {("model" if key == "source_model" else key): value for key, value in values.items()}
        own = {key: value for key, value in values.items() if key in cls.model_fields or key == "layer_range"}
        parameters = dict(own.pop("parameters", None) or {})
        # Options may stand beside the model's name too.
        parameters |= {key: value for key, value in values.items() if key not in own and key != "parameters"}
        if isinstance(own.get("model"), str) and own.get("adapter") is None and "+" in own["model"]:
            # mergekit's way to name an adapter.
            own["model"], _, own["adapter"] = own["model"].partition("+")
        return {**own, "parameters": parameters}


class SliceSource(ModelEntry):
    """Layers of one model, from the first to before the last."""

    layer_range: tuple[int, int]

    @field_validator("layer_range")
    @classmethod
    def _ascends(cls, value: tuple[int, int]) -> tuple[int, int]:
        if not 0 <= value[0] < value[1]:
            raise ValueError(
                f"layers [{value[0]}, {value[1]}] hold no layer; the second number is behind the last layer"
            )
        return value


class Slice(Section):
    """Layers of the result: those of the sources, merged one by one."""

    sources: list[SliceSource] = Field(min_length=1)
    method: str | None = None
    base: str | None = None
    parameters: Options = Field(default_factory=dict)

    @model_validator(mode="before")
    @classmethod
    def _read(cls, values: Any) -> Any:
        return _with_our_keys(values)

    @model_validator(mode="after")
    def _as_many_layers(self) -> Self:
        counts = {source.layer_range[1] - source.layer_range[0] for source in self.sources}
        if len(counts) > 1:
            raise ValueError("the sources of a slice have different numbers of layers")
        return self


class LayerRule(Section):
    """Another method, or other options, for the tensors whose names a regular expression matches anywhere."""

    match: str
    method: str | None = None
    parameters: Options = Field(default_factory=dict)

    @model_validator(mode="before")
    @classmethod
    def _read(cls, values: Any) -> Any:
        if not isinstance(values, Mapping):
            return values
        parameters = dict(values.get("parameters") or {})
        parameters |= {key: value for key, value in values.items() if key not in cls.model_fields}
        return {key: value for key, value in values.items() if key in cls.model_fields} | {"parameters": parameters}

    @field_validator("match")
    @classmethod
    def _compiles(cls, value: str) -> str:
        try:
            re.compile(value)
        except re.error as error:
            raise ValueError(f"is not a regular expression: {error}") from None
        return value


class Recipe(Section):
    """The models to merge, the method and its options.

    Attributes:
        models: one or more; the base may be among them, and says with methods without task vectors which is the first.
        layers: rules for tensors by their names; the first that matches counts.
        slices: layers to stack in place of ``models``.
        as_adapter: write the merged task vector as a LoRA adapter on the base, with the options of `extract_lora`.
        dtype: of the result; that of the base or first model by default, and float32 for an adapter's factors.
        tokenizer: whose the result gets: the ``base``'s (or first model's), or a model's by its name.
        data: a file of records, for methods that need statistics of every model that names no file of its own.
        statistics: how these are computed.
        scores: of the models on a suite, for ``weight: auto``; by default each model's likelihood of its data.
        search: which of its numbers `posttrain.tune.merges.search` chooses by a score.
        align: ``weights`` puts the hidden units of all models in the order of the base's (or first model's) before
            the merge, for models of different initialisation.
    """

    method: str = "linear"
    base: str | None = None
    models: list[ModelEntry] = Field(default_factory=list)
    parameters: Options = Field(default_factory=dict)
    layers: list[LayerRule] = Field(default_factory=list)
    slices: list[Slice] = Field(default_factory=list)
    as_adapter: bool = False
    dtype: OutputType | None = None
    tokenizer: str = "base"
    align: Literal["none", "weights"] = "none"
    seed: int = Field(default=0, ge=0)
    data: str | None = Field(default=None, min_length=1)
    statistics: StatisticsOptions = Field(default_factory=StatisticsOptions)
    scores: list[Annotated[float, Field(ge=0)]] | None = None
    search: SearchConfig | None = None

    @model_validator(mode="before")
    @classmethod
    def _read(cls, values: Any) -> Any:
        return _with_our_keys(values)

    @field_validator("method")
    @classmethod
    def _known(cls, value: str) -> str:
        return METHODS.check(value)

    @model_validator(mode="after")
    def _models_or_slices(self) -> Self:
        if bool(self.models) == bool(self.slices):
            raise ValueError("name the models, or slices of them" if not self.models else "models and slices exclude")
        if self.has_auto_weights and self.slices:
            raise ValueError("the weights of slices are numbers; only those of whole models are computed")
        if self.scores is not None and not self.has_auto_weights:
            raise ValueError("scores are for `weight: auto`")
        if self.method != _MIXTURE and any(m.positive_prompts or m.negative_prompts for m in self.models):
            raise ValueError(f"prompts are those of the experts of a {_MIXTURE}, and the method is {self.method}")
        if self.slices and self.align != "none":
            raise ValueError("align: the layers of slices are not each other's, and cannot be aligned")
        return self

    @property
    def has_auto_weights(self) -> bool:
        """Returns whether the models' weights are computed from their scores and Fisher norms."""
        return self.parameters.get("weight") == AUTO

    def data_files(self) -> list[str]:
        """Returns the files of records that the recipe names, each once."""
        files = [entry.data or self.data for entry in self.entries()]
        return list(dict.fromkeys(file for file in files if file is not None))

    def entries(self) -> list[ModelEntry]:
        """Returns every model that takes part, each once, in the order of the recipe."""
        sources = [source for part in self.slices for source in part.sources]
        return list({(entry.model, entry.adapter): entry for entry in [*self.models, *sources]}.values())


def read_recipe(path: Path) -> Recipe:
    """Reads a recipe's file.

    Raises:
        UserError: it cannot be read, or is not a recipe.
    """
    return Recipe.read(read_yaml(path), str(path))


def _with_our_keys(values: Any) -> Any:
    """Returns the values with our names for mergekit's keys."""
    if not isinstance(values, Mapping):
        return values
    values = {key: value for key, value in values.items() if key not in _WITHOUT_EFFECT}
    if "out_dtype" in values and "dtype" in values:
        del values["dtype"]  # mergekit's dtype to compute in; ours is float32
    renamed = {_OUR_KEYS.get(key, key): value for key, value in values.items()}
    if "experts" in renamed:
        renamed = _of_experts(renamed)
    if "merge_method" in values:
        defaults = _THEIR_DEFAULTS.get(str(values["merge_method"]), {})
        renamed["parameters"] = {**defaults, **(renamed.get("parameters") or {})}
    tokenizer = renamed.get("tokenizer")
    if isinstance(tokenizer, Mapping):
        if tokenizer.keys() - {"source"}:
            raise ValueError("tokenizer: of mergekit's keys, only `source` is read")
        renamed["tokenizer"] = tokenizer.get("source", "base")
    return renamed


def _of_experts(values: dict[str, Any]) -> dict[str, Any]:
    """Returns the values of one of mergekit-moe's recipes with our keys."""
    if "models" in values:
        raise ValueError("`experts` and `models` are one key; remove one of them")
    options = {ours: values.pop(theirs) for theirs, ours in _MIXTURE_OPTIONS.items() if theirs in values}
    values["models"] = values.pop("experts")
    values["parameters"] = {**options, **(values.get("parameters") or {})}
    return {"method": _MIXTURE, **values}


class Position:
    """The position of a tensor in the model: its name, and the share of the layers before its own, from 0 to 1.

    Args:
        depth: None outside of the layers.
    """

    def __init__(self, name: str, depth: float | None) -> None:
        self.name, self.depth = name, depth


def resolve(value: Value | None, position: Position, where: str) -> Value | None:
    """Resolves an option to its scalar for one tensor; a list of lists, one per model, is a value of its own.

    A list of numbers is interpolated over the layers, the first number being the first layer's and the last the last
    layer's; a tensor outside of the layers gets the first number. A list of mappings with ``value``, and ``filter`` (a
    part of the tensor's name) or ``match`` (a regular expression), gives the first that fits.

    Returns:
        None if no condition fits.

    Raises:
        UserError: the list mixes numbers and mappings, or is empty.
    """
    if not isinstance(value, list) or (value and all(isinstance(item, list) for item in value)):
        return value
    if value and all(isinstance(item, Mapping) for item in value):
        for item in value:
            if unknown := item.keys() - {"filter", "match", "value"}:
                name = str(min(unknown))
                raise UserError(f"unknown key `{name}`", where=where, fix=suggest(name, ("filter", "match", "value")))
            if _fits(item, position.name):
                return resolve(item.get("value"), position, where)
        return None
    if not value or not all(isinstance(item, int | float) and not isinstance(item, bool) for item in value):
        raise UserError("is a number, a list of numbers, or a list of `filter` and `value`", where=where)
    scaled = (position.depth or 0.0) * (len(value) - 1)
    lower = min(int(scaled), len(value) - 1)
    upper = min(lower + 1, len(value) - 1)
    share = scaled - lower
    return float(value[lower] * (1 - share) + value[upper] * share)


def _fits(item: Mapping[str, Any], name: str) -> bool:
    if "match" in item:
        return re.search(str(item["match"]), name) is not None
    pattern = item.get("filter")
    return pattern in (None, "*") or str(pattern) in name
