"""Samplers and schedulers as a config names them: a name, or a name with options."""

import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from posttrain.store.errors import UserError, suggest
from posttrain.store.extensions import Registry

Part = TypeVar("Part")

_KINDS = {bool: "truth value", str: "text"}  # of an option, by the type of its default; others are numbers


def read_part(value: Any, where: str) -> tuple[str, dict[str, Any]]:
    """Returns the name and the options of a part.

    Args:
        value: a name, or a mapping with ``name`` and options.
        where: the key, named in errors.

    Raises:
        UserError: the value is neither.
    """
    if isinstance(value, str):
        return value, {}
    if isinstance(value, Mapping) and isinstance(value.get("name"), str):
        return value["name"], {str(key): option for key, option in value.items() if key != "name"}
    raise UserError(f"{value!r} names no {where}", where=where, fix="give a name, or {name: ..., option: ...}")


def make_part(registry: Registry[Callable[..., Part]], value: Any, where: str, *arguments: Any) -> Part:
    """Makes a part of a name and options.

    Args:
        registry: functions that make parts, by name.
        value: as `read_part` takes it.
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

    Args:
        given: number of arguments that the function gets before the options.

    The other arguments and the errors are those of `make_part`.
    """
    name, options = read_part(value, where)
    if name not in registry:
        raise UserError(f"there is no {registry.kind} `{name}`", where=where, fix=suggest(name, registry))
    make = registry.load(name, where)
    parameters = list(inspect.signature(make).parameters.values())[given:]
    known = {parameter.name: parameter for parameter in parameters}
    for option, content in options.items():
        if option not in known:
            raise UserError(f"{name} has no option `{option}`", where=where, fix=suggest(option, known))
        default = known[option].default
        kind = _KINDS.get(type(default), "number")
        if _KINDS.get(type(content), "number") != kind or not isinstance(content, int | float | str):
            raise UserError(f"`{option}` of {name} is not a {kind}", where=where)
        if isinstance(content, float) and not math.isfinite(content):
            raise UserError(f"`{option}` of {name} is {content}", where=where, fix="give a finite number")
        if known[option].annotation in (int, int | None) and content != int(content):
            raise UserError(f"`{option}` of {name} is not a whole number", where=where)
    if missing := [
        key for key, parameter in known.items() if parameter.default is parameter.empty and key not in options
    ]:
        raise UserError(f"{name} needs `{missing[0]}`", where=where, fix=f"give {{name: {name}, {missing[0]}: ...}}")
    return make, options


def check_ranges(where: str, options: Mapping[str, tuple[float, bool, str]]) -> None:
    """Checks options of a part.

    Args:
        where: the key of the part, named in errors.
        options: the value of each, whether it is in its range, and the range in words.

    Raises:
        UserError: a value is out of its range.
    """
    for name, (value, fits, limits) in options.items():
        if not fits:
            raise UserError(f"{value:g} is out of range", where=f"{where}.{name}", fix=f"give {limits}")
