"""Writes the generated parts of the pages anew: python docs/update.py."""

import importlib
import inspect
import json
import re
from collections.abc import Iterator
from dataclasses import is_dataclass
from pathlib import Path
from types import ModuleType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic_core import PydanticUndefined, to_jsonable_python

import posttrain
from posttrain.cli.config import config_keys, reference
from posttrain.data.steps.registry import STEPS
from posttrain.loop.config import Config
from posttrain.merge.methods.registry import METHODS
from posttrain.store.section import Section

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

GUIDES = {
    "data": "[data.md](data.md) describes every step with its settings.",
    "select": "[select.md](select.md) describes the strategies, the scores and when to stop.",
    "train": "[training.md](training.md) shows objectives, curricula, checkpoints and monitors at work.",
    "tune": "[tuning.md](tuning.md#in-the-loop) shows a round that tunes.",
    "merge": "[merging.md](merging.md#in-the-loop) shows a round that merges.",
    "evaluate": "[Suites](#suites) above lists the keys of a suite.",
    "gate": "[Rules](#rules) above lists the names that rules can use.",
    "triggers": "[Rules](#rules) above lists the names of rules; [watching.md](watching.md) shows a schedule.",
    "drift": "[watching.md](watching.md#drift) describes the values.",
}
"""Where a section of the config is explained."""


def pages() -> dict[Path, str]:
    """Render every page with a generated part."""
    configuration, data, api = FOLDER / "configuration.md", FOLDER / "data.md", FOLDER / "api.md"
    merging = FOLDER / "merging.md"
    page = _replace_part(configuration.read_text("utf-8"), "common keys", common_keys())
    return {
        configuration: _replace_part(page, "sections", sections_reference()),
        data: _replace_part(data.read_text("utf-8"), "steps", steps_reference()),
        merging: _replace_part(merging.read_text("utf-8"), "methods", methods_reference()),
        api: _replace_part(api.read_text("utf-8"), "names", api_reference()),
    }


def _replace_part(page: str, name: str, content: str) -> str:
    begin, end = f"<!-- {name}: written by docs/update.py -->\n", f"<!-- end of {name} -->\n"
    before, rest = page.split(begin)
    return before + begin + content + end + rest.split(end)[1]


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


def sections_reference() -> str:
    """Render every key as YAML, one part a section; joined they are what `config show --defaults` prints."""
    parts = re.split(r"(?m)^(?=# .*\n\w+:)", reference(Config))[1:]
    # An optional section is null, with its keys in comments below.
    scalars = [part for part in parts if re.search(r"(?m)^\w+: +\S", part) and "\n#   " not in part]
    rendered = [("The top level", "", "".join(scalars))]
    for part in parts[len(scalars) :]:
        name = part.splitlines()[1].partition(":")[0]
        rendered.append((f"`{name}`", GUIDES.get(name, ""), part))
    texts = []
    for title, guide, yaml in rendered:
        texts += [f"\n### {title}\n\n", f"{guide}\n\n" if guide else "", f"```yaml\n{yaml.rstrip()}\n```\n"]
    return "".join(texts) + "\n"


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


def api_reference() -> str:
    """Render the public names of posttrain, and the base classes and contract suites that extending.md names."""
    parts = [_object_text(f"posttrain.{name}", getattr(posttrain, name)) for name in sorted(posttrain.__all__)]
    parts.append("## Parts of your own\n\n[extending.md](extending.md) has an example of each.\n")
    extending = (FOLDER / "extending.md").read_text("utf-8")
    paths = dict.fromkeys(re.findall(r"`(posttrain(?:\.\w+)+\.[A-Z]\w+)`", extending))
    parts += [_object_text(path, _find_object(path)) for path in paths]
    return "\n" + "\n".join(parts)


def _find_object(path: str) -> Any:
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


def _object_text(path: str, value: Any) -> str:
    """Render a function, or a class with its public methods; those of a contract suite are tests."""
    if isinstance(value, ModuleType):  # `posttrain.train`, a package that is called as its function
        value = value.train
    parts = [f"### `{path}`\n", _signature(path.rpartition(".")[2], value), _docstring(value)]
    if isinstance(value, type) and not path.startswith("posttrain.testing") and not issubclass(value, Exception):
        bases = [base for base in _bases(value)[1:] if "Attributes:" in (base.__doc__ or "")]
        # What the dataclass's own docstring repeats is left out.
        bases = [base for base in bases if not is_dataclass(base)]
        parts += [f"From its base `{base.__name__}`:\n\n{_docstring(base)}" for base in bases]
        for name, member in _members(value).items():
            function = getattr(member, "__func__", member)
            if isinstance(function, property) or (inspect.isfunction(function) and function.__doc__):
                title = "" if isinstance(function, property) else _signature(name, function)
                parts += [f"#### `{value.__name__}.{name}`\n", title, _docstring(function)]
    return "\n".join(part for part in parts if part)


def _bases(value: type) -> list[type]:
    """Return a class and its bases in posttrain."""
    return [base for base in value.__mro__ if base.__module__.startswith("posttrain.") and base is not Section]


def _members(value: type) -> dict[str, Any]:
    """Return the public members of a class and of its bases in posttrain, the class's own first."""
    members: dict[str, Any] = {}
    for base in _bases(value):
        members |= {name: member for name, member in vars(base).items() if name not in members}
    return {name: member for name, member in members.items() if not name.startswith(("_", "model_"))}


def _signature(name: str, value: Any) -> str:
    try:
        text = str(inspect.signature(value))
    except (TypeError, ValueError):
        return ""
    # Types by their own names: `collections.abc.Mapping` is read as `Mapping`.
    text = re.sub(r"<factory>|<[\w.]+ object at 0x\w+>", "...", text)
    text = re.sub(r"'[^']*'|\b(?:[a-z_]\w*\.)+(?=\w)", lambda match: match[0] if "'" in match[0] else "", text)
    text = re.sub(r"\((?:self|cls)(?:, )?", "(", text)
    text = re.sub(r"(: |-> )'([^']*)'", r"\1\2", text)
    line = f"{name}{text}"
    if len(line) > _SIGNATURE_WIDTH:
        inside, _, after = line.partition("(")[2].rpartition(")")
        arguments = "".join(f"    {argument},\n" for argument in _split_arguments(inside))
        line = f"{name}(\n{arguments}){after}"
    return f"```python\n{line}\n```\n"


def _split_arguments(text: str) -> list[str]:
    """Split at the commas outside of brackets."""
    arguments, depth = [""], 0
    for part in re.split(r"(, |[\[\](){}])", text):
        depth += (part in ("[", "(", "{")) - (part in ("]", ")", "}"))
        if part == ", " and not depth:
            arguments.append("")
        else:
            arguments[-1] += part
    return arguments


_SIGNATURE_WIDTH = 100
_SECTION = re.compile(r"(Args|Attributes|Returns|Raises|Yields):")


def _docstring(value: Any) -> str:
    """Render a docstring as Markdown: its sections as bold titles, and the names in them as list items."""
    lines: list[str] = []
    section = None
    for line in (inspect.getdoc(value) or "").replace("``", "`").splitlines():
        if match := _SECTION.fullmatch(line):
            section = match[1]
            lines += [f"**{section.replace('Args', 'Arguments')}**", ""]
        elif section and (item := re.fullmatch(r"    ([\w*]+): (.*)", line)) and section != "Returns":
            lines.append(f"- `{item[1]}`: {item[2]}")
        elif section and line.startswith("    "):
            lines.append(("" if section in ("Returns", "Yields") else "  ") + line.strip())
        else:
            section = None if line else section
            lines.append(line)
    text = "\n".join(lines)
    return re.sub(r"(`[^`]*`)|<", lambda match: match[1] or r"\<", text) + "\n"


def _json(value: Any) -> str:
    return json.dumps(to_jsonable_python(value), ensure_ascii=False)


if __name__ == "__main__":
    for page, text in pages().items():
        page.write_text(text, "utf-8")
