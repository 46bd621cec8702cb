"""Every config key with its default and its description, read from the sections themselves."""

import json
from types import UnionType
from typing import Any, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from posttrain.data.steps.step import Step
from posttrain.data.versions.recipe import step_values


def reference(section: type[BaseModel], indent: int = 0) -> str:
    """Commented YAML of a section: each key with its default, what it means above it."""
    lines: list[str] = []
    pad = " " * indent
    for name, field in section.model_fields.items():
        lines.append(f"{pad}# {field.description}")
        inner = _section(field.annotation)
        if inner is not None and field.default is None:
            # Left out unless it is set: its keys stand there as a comment.
            lines += [f"{pad}{name}: null", *(f"{pad}# {line}" for line in reference(inner, 2).splitlines())]
        elif inner is not None:
            lines += [f"{pad}{name}:", reference(inner, indent + 2)]
        elif (one := _section_of_list(field.annotation)) and not field.default:
            # Empty as it is: what stands in it is there as a comment.
            lines += [f"{pad}{name}: []", f"{pad}# - each with"]
            lines += [f"{pad}#   {line}" for line in reference(one).splitlines()]
        elif field.is_required():
            lines.append(f"{pad}{name}:  # required")
        else:
            lines.append(f"{pad}{name}: {_shown(field.get_default(call_default_factory=True))}")
    return "\n".join(lines)


def _section(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    if get_origin(annotation) in (Union, UnionType):
        return next((found for part in get_args(annotation) if (found := _section(part))), None)
    return None


def _section_of_list(annotation: Any) -> type[BaseModel] | None:
    (inner,) = get_args(annotation) if get_origin(annotation) is list else (None,)
    return _section(inner)


def _shown(value: Any) -> str:
    if value is PydanticUndefined:
        return ""
    if isinstance(value, dict):
        value = {
            key: inner.model_dump(mode="json") if isinstance(inner, BaseModel) else inner
            for key, inner in value.items()
        }
    if isinstance(value, list):
        value = [step_values(one) if isinstance(one, Step) else one for one in value]
    return json.dumps(value, ensure_ascii=False)
