"""The base of every config section: strict keys, and errors that name the key and the nearest known one."""

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from types import UnionType
from typing import Any, ClassVar, Literal, Self, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, ValidationError, ValidationInfo, field_validator

from posttrain.store.errors import UserError, closest_match, share_words, shorten, to_line

MAX_INTEGER = 2**31 - 1
"""The largest integer of a config: more would overflow in native code, long after the config was read."""

_LISTED = 5  # of several unknown keys

_CUTOFF = 0.7  # from this likeness on, an unknown key is taken for a mistyped one


class Section(BaseModel):
    """A section of ``posttrain.yaml``. Immutable; an unknown key is an error.

    Numbers are finite, integers have at most 32 bits, and true and false are not numbers.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False)

    key_list: ClassVar[str | None] = None
    """The command that lists the keys, for the errors of a whole config."""

    key_aliases: ClassVar[Mapping[str, tuple[str, str]]] = {}
    """Dotted key of a whole config, and a note, by the name that another program has for it; no key: the note alone."""

    value_aliases: ClassVar[Mapping[str, Mapping[str, tuple[str, str]]]] = {}
    """Value and note by dotted key of a whole config and by the value that another program has."""

    @field_validator("*", mode="before")
    @classmethod
    def _no_truth_values_as_numbers(cls, value: Any, info: ValidationInfo) -> Any:
        if info.field_name in _number_fields(cls) and any(isinstance(item, bool) for item in _items(value)):
            # YAML reads `yes`, `no`, `on` and `off` as these; pydantic would take them for 1 and 0.
            raise ValueError(
                f"a number is expected, not {shorten(str(value).lower())} (as YAML reads yes, no, on and off)"
            )
        return value

    @field_validator("*", mode="after")
    @classmethod
    def _integers_fit(cls, value: Any) -> Any:
        # Of the read values, as text in a command or in quotes becomes a number too.
        if any(isinstance(item, int) and abs(item) > MAX_INTEGER for item in _items(value)):
            raise ValueError(f"an integer is at most {MAX_INTEGER} and at least -{MAX_INTEGER}")
        return value

    @classmethod
    def read(cls, values: Mapping[str, Any], where: str) -> Self:
        """Checks ``values`` and returns the section.

        Args:
            values: The section as read from YAML or the command line.
            where: The file that the values come from, named in the error.

        Raises:
            UserError: on the first value that does not fit, with its key.
        """
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            raise _to_user_error(cls, error, where) from None


def _path(problem: Mapping[str, Any]) -> list[str]:
    """Returns the keys that lead to a problem; they are the user's too, and may hold anything."""
    return [shorten(to_line(str(part))) for part in problem["loc"]]


def _to_user_error(section: type["Section"], error: ValidationError, where: str) -> UserError:
    # Only the first: the later ones are often consequences of it, such as a required key that was mistyped.
    problem, *others = error.errors(include_url=False)
    path = _path(problem)
    key = ".".join(path)
    if problem["type"] == "extra_forbidden":
        fixes = [suggest_key(section, path)]
        if section.key_aliases.get(path[-1], (key,))[0]:
            fixes.append(_listing(section, path[:-1]))
        hints = [" ".join(filter(None, fixes))]
        # All at once, as none is a consequence: another program's config has many.
        if unknown := [f"`{'.'.join(_path(other))}`" for other in others if other["type"] == "extra_forbidden"]:
            more = f" and {len(unknown) - _LISTED} more" if len(unknown) > _LISTED else ""
            hints.append(f"unknown too: {', '.join(unknown[:_LISTED])}{more}")
        return UserError(f"unknown key `{key}`", where=where, fix="; ".join(filter(None, hints)) or None, key=key)
    if problem["type"] == "model_type" and (within := _section_at(section, path)):
        example = ".".join([*path, next(iter(within.model_fields))])
        return UserError(f"`{key}` is a section: set one of its keys, such as {example}", where=where, key=key)
    if (aliases := section.value_aliases.get(key)) and (alias := aliases.get(str(problem["input"]).lower())):
        value = shorten(to_line(str(problem["input"])))
        return UserError(f"`{key}`: there is no `{value}`", where=where, fix=describe_alias(alias), key=key)
    message = problem["msg"].removeprefix("Value error, ")
    if problem["type"] in ("float_parsing", "int_parsing"):
        message = f"a number is expected, not `{shorten(to_line(problem['input']))}`"
    return UserError(f"`{key}`: {message}" if key else message, where=where, key=key)


@cache
def _number_fields(section: type[BaseModel]) -> frozenset[str]:
    """Returns the fields that hold numbers, alone or in a list or mapping, and no truth values."""
    types = {name: set(_plain_types(field.annotation)) for name, field in section.model_fields.items()}
    return frozenset(name for name, inner in types.items() if inner & {int, float} and not inner & {bool, Any})


def _plain_types(annotation: Any) -> Iterator[Any]:
    """Yields the types that an annotation is composed of, and the types of its literals."""
    if get_origin(annotation) is Literal:
        yield from (type(choice) for choice in get_args(annotation))
    elif arguments := get_args(annotation):
        for inner in arguments:
            yield from _plain_types(inner)
    else:
        yield annotation


def _items(value: Any) -> Iterator[Any]:
    """Yields the value, or the values in a list or mapping; the sections in it check their own."""
    if isinstance(value, Mapping):
        yield from value.values()
    elif isinstance(value, list | tuple):
        yield from value
    else:
        yield value


def suggest_key(section: type["Section"], path: Sequence[str]) -> str | None:
    """Suggests the key that was meant: another program's, the same in a section below, or a similar one in this.

    Args:
        section: section that the path begins in.
        path: names of the sections around an unknown key, and the key.

    Returns:
        A question such as ``did you mean `train.learning_rate`?``; None if nothing is like it.
    """
    *parents, name = path
    if (at := _section_at(section, parents)) is None:
        return None
    if (alias := section.key_aliases.get(name)) is not None:
        return describe_alias(alias)
    below = _paths_below(at, name)
    # The shallowest path, and only if no other is as shallow: a wrong suggestion is worse than none.
    shortest = [path_below for path_below in below if len(path_below) == min(map(len, below))]
    if len(shortest) == 1:
        return f"did you mean `{'.'.join([*parents, *shortest[0]])}`?"
    keys = sorted(at.model_fields)
    match = closest_match(name, keys, _CUTOFF) or closest_match(name, [key for key in keys if share_words(name, key)])
    return f"did you mean `{'.'.join([*parents, match])}`?" if match else None


def describe_alias(alias: tuple[str, str]) -> str:
    """Returns the hint for another program's name: ours and how it differs, or why there is none."""
    name, note = alias
    if not name:
        return note
    return f"did you mean `{name}` ({note})?" if note else f"did you mean `{name}`?"


def _listing(section: type[BaseModel], parents: list[str]) -> str | None:
    """Names the command that lists the keys after an unknown one; None if no command does."""
    command = getattr(section, "key_list", None)
    if command is None:
        return None
    # Positions in lists and names of the user's own have placeholders in the list of keys: the prefix ends there.
    prefix: list[str] = []
    at: type[BaseModel] | None = section
    while parents[len(prefix) :] and at is not None and parents[len(prefix)] in at.model_fields:
        at = _section_type(at.model_fields[parents[len(prefix)]].annotation)
        prefix.append(parents[len(prefix)])
    return " ".join([f"`{command}", ".".join(prefix)]).rstrip() + "` lists the keys"


def _paths_below(section: type[BaseModel], name: str) -> list[list[str]]:
    """Returns the paths to all keys of that name below a section, except those in lists and mappings."""
    paths: list[list[str]] = []
    for key, field in section.model_fields.items():
        inner = _section_type(field.annotation)
        if inner is None or get_origin(field.annotation) in (list, dict, tuple):
            continue  # its path would need an index or a name that only the user knows
        if name in inner.model_fields:
            paths.append([key, name])
        paths += [[key, *path] for path in _paths_below(inner, name)]
    return paths


def _section_at(section: type[BaseModel], path: list[str]) -> type[BaseModel] | None:
    """Returns the section that ``path`` leads to; None if it leads to a plain value."""
    current: type[BaseModel] | None = section
    for part in path:
        if current is None or part not in current.model_fields:
            continue  # a key of a mapping, or a union's tag: the section stays
        current = _section_type(current.model_fields[part].annotation)
    return current


def _section_type(annotation: Any) -> type[BaseModel] | None:
    """Returns the config section inside an annotation such as ``dict[str, Suite]`` or ``Lora | None``, or None."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    if get_origin(annotation) in (Union, UnionType, list, dict, tuple):
        for inner in get_args(annotation):
            if section := _section_type(inner):
                return section
    return None
