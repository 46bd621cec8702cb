"""Samplers and schedulers as a config names them: a name, or a name with options."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from pydantic import create_model

from posttrain.store.errors import UserError, suggest
from posttrain.store.extensions import Registry
from posttrain.store.section import Section

Part = TypeVar("Part")


def make_part(registry: Registry[Callable[..., Part]], value: Any, where: str, *arguments: Any) -> Part:
    """Makes a part of a name and options.

    Args:
        registry: functions that make parts, by name.
        value: a name, or a mapping with ``name`` and options.
        where: the key, named in errors.
        arguments: given to the function before the options.

    Raises:
        UserError: there is no such part, or it has no such option, or lacks one.
    """
    make, options = check_part(registry, value, where, len(arguments))
    return make(*arguments, **options)


def check_part(
    registry: Registry[Callable[..., Part]], value: Any, where: str, given: int
) -> tuple[Callable[..., Part], dict[str, Any]]:
    """Returns the function that makes a part, and its options, without making it.

    The function's signature says which options it has, their types and their ranges.

    Args:
        given: number of arguments that the function gets before the options.

    The other arguments and the errors are those of `make_part`.
    """
    options = {"name": value} if isinstance(value, str) else value
    if not isinstance(options, Mapping) or not isinstance(name := options.get("name"), str):
        raise UserError(f"{value!r} names no {where}", where=where, fix="give a name, or {name: ..., option: ...}")
    if name not in registry:
        raise UserError(f"there is no {registry.kind} `{name}`", where=where, fix=suggest(name, registry))
    make = registry.load(name, where)
    parameters = list(inspect.signature(make, eval_str=True).parameters.values())[given:]
    fields: dict[str, Any] = {
        parameter.name: (parameter.annotation, ... if parameter.default is parameter.empty else parameter.default)
        for parameter in parameters
    }
    section = create_model(name, __base__=Section, **fields)
    read = section.read({key: option for key, option in options.items() if key != "name"}, where)
    return make, read.model_dump(exclude_unset=True)
