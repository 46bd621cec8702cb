"""Write the generated parts of the pages anew: python docs/update.py."""

import inspect
import json
import re
from collections.abc import Iterator
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic_core import PydanticUndefined, to_jsonable_python

from posttrain.data.steps.registry import STEPS
from posttrain.inspect.config_reference import reference
from posttrain.loop.config import Config

FOLDER = Path(__file__).parent
_BEGIN, _END = "<!-- steps: written by docs/update.py -->\n", "<!-- end of steps -->\n"


def pages() -> dict[Path, str]:
    """What every page with a generated part should say."""
    configuration, data = FOLDER / "configuration.md", FOLDER / "data.md"
    block = f"```yaml\n{reference(Config)}\n```\n"
    before, rest = data.read_text("utf-8").split(_BEGIN)
    after = rest.split(_END)[1]
    return {
        configuration: re.sub(
            r"```yaml\n# Fixes.*?^```\n",
            lambda _: block,
            configuration.read_text("utf-8"),
            flags=re.DOTALL | re.MULTILINE,
        ),
        data: before + _BEGIN + steps_reference() + _END + after,
    }


def steps_reference() -> str:
    """Every step of the registry: what its docstring says, and a table of its settings."""
    return "\n".join(part for name, step in STEPS.items() for part in (f"### {name}\n", _told(step)))


def _told(section: type[BaseModel]) -> str:
    text = inspect.cleandoc(section.__doc__ or "").replace("``", "`")
    # Markdown would take placeholders such as <EMAIL> for tags.
    text = re.sub(r"(`[^`]*`)|<", lambda found: found[1] or r"\<", text)
    rows, methods = [], []
    for name, default, meaning, others in _settings(section):
        rows.append(f"| `{name}` | {default} | {meaning} |")
        methods += others
    table = ["| setting | default | meaning |", "| --- | --- | --- |", *rows] if rows else ["No settings."]
    told = [text, "\n".join(table)]
    for method in methods:
        told.append(f"`method: {method.model_fields['method'].default}`. {_told(method)}".rstrip())
    return "\n\n".join(told) + "\n"


def _settings(section: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, str, str, list[type[BaseModel]]]]:
    """Name, default, meaning and, for a list of things that are told apart by ``method``, the sections of these."""
    for name, field in section.model_fields.items():
        if name == "method" and field.description is None:
            continue
        inner = _sections(field.annotation)
        if len(inner) == 1:
            yield from _settings(inner[0], f"{prefix}{name}.")
            continue
        value = field.get_default(call_default_factory=True)
        default = "required" if value is PydanticUndefined else f"`{_json(value)}`"
        meaning = (field.description or "").replace("|", r"\|").replace("<", r"\<")
        choices = [f"`{_json(choice).strip(chr(34))}`" for choice in _choices(field.annotation)]
        if not all(choice.strip("`") in meaning for choice in choices):
            meaning += f" ({', '.join(choices)})"
        yield f"{prefix}{name}", default, meaning, inner


def _sections(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [found for part in get_args(annotation) for found in _sections(part)]


def _choices(annotation: Any) -> list[Any]:
    if get_origin(annotation) is Literal:
        return list(get_args(annotation))
    if get_origin(annotation) in (Union, UnionType):
        return [choice for part in get_args(annotation) for choice in _choices(part)]
    return []


def _json(value: Any) -> str:
    return json.dumps(to_jsonable_python(value), ensure_ascii=False)


if __name__ == "__main__":
    for page, text in pages().items():
        page.write_text(text, "utf-8")
