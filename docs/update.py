"""Writes the generated tables of the pages: python docs/update.py."""

import inspect
import json
import re
import textwrap
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

import yaml
from pydantic import BaseModel
from pydantic_core import PydanticUndefined, to_jsonable_python

from posttrain.cli.config import config_keys
from posttrain.data.steps.registry import STEPS
from posttrain.loop.config import Config
from posttrain.merge.methods.registry import METHODS

FOLDER = Path(__file__).parent

COMMON_KEYS = [
    *("model", "rounds", "seed", "task.system", "task.labels", "task.max_new_tokens"),
    *("data.pool", "data.labelled", "data.test", "data.columns", "data.steps"),
    *("select.strategy", "select.pool_sample", "select.explore", "select.focus"),
    *("label.annotator", "label.per_round", "label.budget"),
    *("train.method", "train.start", "train.epochs", "train.learning_rate", "train.batch_size", "train.max_length"),
    *("train.precision", "evaluate.suites", "gate.deploy", "gate.rollback", "triggers.any", "deploy.command"),
]
"""The keys that people set, in the order of the page's first table."""


def pages() -> dict[Path, str]:
    """Render every page with a generated part."""
    parts = {
        "../README.md": ("limits", partial(limits, "en")),
        "../README.zh-CN.md": ("limits", partial(limits, "zh")),
        "configuration.md": ("common keys", common_keys),
        "data.md": ("steps", steps_reference),
        "merging.md": ("methods", methods_reference),
    }
    return {
        FOLDER / page: _replace_part((FOLDER / page).read_text("utf-8"), part, render())
        for page, (part, render) in parts.items()
    }


def _replace_part(page: str, name: str, content: str) -> str:
    begin, end = f"<!-- {name}: written by docs/update.py -->\n", f"<!-- end of {name} -->\n"
    before, rest = page.split(begin)
    return before + begin + content + end + rest.split(end)[1]


def limits(language: str) -> str:
    """Render the list of what posttrain does not do yet, in ``en`` or ``zh``."""
    entries = yaml.safe_load((FOLDER / "limits.yaml").read_text("utf-8"))
    return "\n".join(["", *(_list_item(entry[language]) for entry in entries), "", ""])


def _list_item(text: str) -> str:
    # A line does not break inside code.
    whole = re.sub(r"`[^`]*`", lambda match: match[0].replace(" ", "\0"), text)
    wrap = textwrap.TextWrapper(120, initial_indent="- ", subsequent_indent="  ", break_long_words=False)
    return wrap.fill(whole).replace("\0", " ")


def methods_reference() -> str:
    """Render the table of merge methods: what each does, and its options with their defaults."""
    rows = []
    for name in METHODS.builtin:
        method = METHODS[name]
        options = [f"`{option}` {_option_default(entry.default)}" for option, entry in method.options.items()]
        summary = (inspect.getdoc(method.function) or "").partition("\n\n")[0].replace("\n", " ")
        base = "yes" if method.task_vectors else ""
        rows.append(f"| `{name}` | {base} | {_cell(summary)} | {', '.join(options) or '–'} |")
    return "\n".join(["", "| method | base | what it does | options |", "| --- | --- | --- | --- |", *rows, "", ""])


def _option_default(value: Any) -> str:
    single = value[0] if isinstance(value, tuple) and len(set(value)) == 1 else value
    return str(single).lower() if isinstance(single, bool) else str(single)


def common_keys() -> str:
    """Render the table of the keys that people set."""
    keys = {entry.key: entry for entry in config_keys(Config)}
    rows = []
    for name in COMMON_KEYS:
        entry = keys[name]
        default = "required" if entry.default is None else f"`{entry.default}`"
        rows.append(f"| `{name}` | {default if len(default) <= 40 else 'see below'} | {_cell(entry.meaning)} |")
    return "\n".join(["", "| key | default | meaning |", "| --- | --- | --- |", *rows, "", ""])


def _cell(text: str) -> str:
    """Escape what Markdown would take for a table's border or a tag."""
    return text.replace("|", r"\|").replace("<", r"\<")


def steps_reference() -> str:
    """Render every step of the registry: its docstring, and a table of its settings."""
    return "\n".join(part for name, step in STEPS.items() for part in (f"### {name}\n", _step_text(step)))


def _step_text(section: type[BaseModel]) -> str:
    text = inspect.cleandoc(section.__doc__ or "").replace("``", "`")
    # Markdown would take placeholders such as <EMAIL> for tags.
    text = re.sub(r"(`[^`]*`)|<", lambda match: match[1] or r"\<", text)
    rows, methods = [], []
    for name, default, meaning, others in _settings(section):
        rows.append(f"| `{name}` | {default} | {meaning} |")
        methods += others
    table = ["| setting | default | meaning |", "| --- | --- | --- |", *rows] if rows else ["No settings."]
    parts = [text, "\n".join(table)]
    for method in methods:
        parts.append(f"`method: {method.model_fields['method'].default}`. {_step_text(method)}".rstrip())
    return "\n\n".join(parts) + "\n"


def _settings(section: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, str, str, list[type[BaseModel]]]]:
    """Yield name, default, meaning and, for a list of sections distinguished by ``method``, those sections."""
    for name, field in section.model_fields.items():
        if name == "method" and field.description is None:
            continue
        inner = _sections(field.annotation)
        if len(inner) == 1:
            yield from _settings(inner[0], f"{prefix}{name}.")
            continue
        value = field.get_default(call_default_factory=True)
        default = "required" if value is PydanticUndefined else f"`{_json(value)}`"
        meaning = _cell(field.description or "")
        choices = [f"`{_json(choice).strip(chr(34))}`" for choice in _choices(field.annotation)]
        if not all(choice.strip("`") in meaning for choice in choices):
            meaning += f" ({', '.join(choices)})"
        yield f"{prefix}{name}", default, meaning, inner


def _sections(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [section for part in get_args(annotation) for section in _sections(part)]


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
