"""The base of every config section: strict keys, and errors that name the key and the nearest known one."""

from collections.abc import Mapping
from types import UnionType
from typing import Any, Self, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, ValidationError

from posttrain.store.errors import UserError
from posttrain.store.nearest import did_you_mean


class Section(BaseModel):
    """One section of ``posttrain.yaml``. Immutable; an unknown key is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)

    @classmethod
    def read(cls, values: Mapping[str, Any], where: str) -> Self:
        """Check ``values`` and return the section.

        Args:
            values: the section as read from YAML or the command line.
            where: the file that the values come from, named in the error.

        Raises:
            UserError: on the first value that does not fit, with its key.
        """
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            raise _first_problem(cls, error, where) from None


def _first_problem(section: type[BaseModel], error: ValidationError, where: str) -> UserError:
    problem = error.errors(include_url=False)[0]
    path = [str(part) for part in problem["loc"]]
    key = ".".join(path)
    if problem["type"] == "extra_forbidden":
        known = _known_keys(section, path[:-1])
        return UserError(f"unknown key `{key}`", where=where, fix=did_you_mean(path[-1], known))
    message = problem["msg"].removeprefix("Value error, ")
    return UserError(f"`{key}`: {message}" if key else message, where=where)


def _known_keys(section: type[BaseModel], path: list[str]) -> list[str]:
    """Keys that the section reached by ``path`` knows."""
    current: type[BaseModel] | None = section
    for part in path:
        if current is None or part not in current.model_fields:
            continue  # a key of a mapping, or a union's tag: the section stays
        current = _section_in(current.model_fields[part].annotation)
    return sorted(current.model_fields) if current else []


def _section_in(annotation: Any) -> type[BaseModel] | None:
    """The config section that an annotation holds, such as in ``dict[str, Suite]`` or ``Lora | None``."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    if get_origin(annotation) in (Union, UnionType, list, dict, tuple):
        for inner in get_args(annotation):
            if found := _section_in(inner):
                return found
    return None
