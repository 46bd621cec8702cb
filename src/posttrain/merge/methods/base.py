"""Merge methods: typed functions over one tensor of all models, whose signatures are the schemas of their options."""

import inspect
import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from types import NoneType, UnionType
from typing import Any, Literal, get_args, get_origin

from posttrain.store.errors import UserError, shorten, suggest

Result = Literal["model", "adapter", "mixture"]
"""Kind of a method's result: a model like its inputs, a LoRA adapter on the base, or a mixture of experts."""

FLOAT32_MAX = (2 - 2**-23) * 2.0**127
"""The largest number that methods, which compute in float32, can work with."""

PerModel = tuple[float, ...]
"""Annotation of an option with one number per model; a single number counts for all of them."""

Statistic = Literal["fisher", "gram"]
"""A statistic of one model on its data: the diagonal Fisher information, or the Gram matrices of its linear layers."""

PerHead = tuple[tuple[float, ...], ...]
"""Annotation of an option with a list a model, of one number an attention head."""

MethodFunction = Callable[..., Any]
"""Takes a `TensorGroup` and options, returns a `BlockFunction`; untyped, as the config is read without torch."""


@dataclass(frozen=True)
class Range:
    """Bounds of an option's number, both included."""

    low: float = -math.inf
    high: float = math.inf

    def __contains__(self, value: float) -> bool:
        return self.low <= value <= self.high


@dataclass(frozen=True)
class MergeMethod:
    """A merge method.

    Attributes:
        function: called once a tensor with its `TensorGroup` and the options by keyword. It may ask the group for
            statistics of the whole tensor, and returns the function that merges one block.
        task_vectors: the group's values are task vectors (weights minus base) and the result is added to the base.
        models: the least and the most models that it merges, without the base.
        ranges: bounds of options.
        statistic: what it needs of each model's data: ``fisher`` is in the blocks, ``gram`` in the group.
        result: what it writes.
        accelerated: its blocks may lie on a GPU: those that solve equations, and the mean, which goes with them.
        needs: options of which a recipe must give at least one, as their defaults make another method of it.
    """

    name: str
    function: MethodFunction
    task_vectors: bool = False
    models: tuple[int, int | None] = (1, None)
    ranges: Mapping[str, Range] = field(default_factory=dict)
    statistic: Statistic | None = None
    result: Result = "model"
    accelerated: bool = False
    needs: tuple[str, ...] = ()

    @cached_property
    def options(self) -> dict[str, inspect.Parameter]:
        """Returns the options of the signature, by name."""
        parameters = inspect.signature(self.function).parameters
        return {name: p for name, p in parameters.items() if p.kind is inspect.Parameter.KEYWORD_ONLY}

    def check_models(self, count: int) -> None:
        """Raises a UserError unless the method merges this number of models."""
        low, high = self.models
        if count < low or (high is not None and count > high):
            number = f"{low}" if low == high else f"{low} or more" if high is None else f"{low} to {high}"
            base = " besides the base" if self.task_vectors else ""
            raise UserError(
                f"{self.name} merges {number} model{'' if number == '1' else 's'}{base}, not {count}",
                where="models",
            )

    def check_needs(self, options: Collection[str], where: str) -> None:
        """Raises a UserError if the method needs an option, and none of those that are given is one."""
        if self.needs and not set(self.needs) & set(options):
            fix = "`posttrain merge` with --data FILE measures them, or write them into the recipe"
            raise UserError(
                f"{self.name} merges by {' and '.join(self.needs)}, which are missing", where=where, fix=fix
            )

    def check_name(self, option: str, where: str) -> None:
        """Raises a UserError unless the method has the option."""
        if option not in self.options:
            raise UserError(
                f"{self.name} has no option `{option}`", where=where, fix=suggest(option, self.options) or "remove it"
            )

    def read_option(self, option: str, value: Any, models: int, where: str) -> Any:
        """Returns an option's value in the type that its annotation has.

        Args:
            value: a number, a truth value or a text; for an option with a number per model also a list.
            models: number of models.

        Raises:
            UserError: it has another type, length or range.
        """
        parameter = self.options[option]
        if parameter.annotation == PerModel:
            numbers = list(value) if isinstance(value, list | tuple) else [value] * models
            if len(numbers) != models:
                raise UserError(f"has {len(numbers)} values for {models} models", where=where, fix="give one per model")
            return tuple(self._number(option, float, number, where) for number in numbers)
        annotation = _without_none(parameter.annotation)
        if annotation == PerHead:
            if not isinstance(value, list | tuple) or len(value) != models:
                raise UserError(f"is not a list of {models} lists", where=where, fix="give each model a list")
            rows = [list(row) if isinstance(row, list | tuple) else [row] for row in value]
            return tuple(tuple(self._number(option, float, number, where) for number in row) for row in rows)
        if get_origin(annotation) is Literal:
            if value not in get_args(annotation):
                names = [str(name) for name in get_args(annotation)]
                raise UserError(f"`{value}` is not a choice", where=where, fix=f"one of {', '.join(names)}")
            return value
        if annotation is bool:
            if not isinstance(value, bool):
                raise UserError(f"is true or false, not `{value}`", where=where)
            return value
        return self._number(option, annotation, value, where)

    def _number(self, option: str, kind: type, value: Any, where: str) -> Any:
        bounds = self.ranges.get(option, Range())
        fits = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= FLOAT32_MAX
        if not fits or (kind is int and value != int(value)):
            size = ", which is too large" if isinstance(value, int | float) and abs(value) > FLOAT32_MAX else ""
            what = f"is {'an integer' if kind is int else 'a number'}, not `{shorten(str(value))}`{size}"
            raise UserError(what, where=where)
        if value not in bounds:
            raise UserError(f"{value} is not between {bounds.low:g} and {bounds.high:g}", where=where)
        return kind(value)


def merge_method(
    name: str,
    *,
    task_vectors: bool = False,
    models: tuple[int, int | None] = (1, None),
    ranges: Mapping[str, Range] | None = None,
    statistic: Statistic | None = None,
    result: Result = "model",
    accelerated: bool = False,
    needs: tuple[str, ...] = (),
) -> Callable[[MethodFunction], MergeMethod]:
    """Makes a `MergeMethod` of a function; its options are the keyword-only parameters with their defaults."""

    def wrap(function: MethodFunction) -> MergeMethod:
        return MergeMethod(name, function, task_vectors, models, ranges or {}, statistic, result, accelerated, needs)

    return wrap


def _without_none(annotation: Any) -> Any:
    if isinstance(annotation, UnionType):
        return next(part for part in get_args(annotation) if part is not NoneType)
    return annotation
