"""``posttrain config``: shows and checks posttrain.yaml, and lists its keys as the sections define them."""

import json as json_text
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import typer
import yaml
from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from posttrain.cli.output import JsonOption, one_line, print_error, print_json, print_line, print_table
from posttrain.cli.workspace import CURRENT_FOLDER, WorkspaceOption, open_store
from posttrain.data.reading.rows import join_names
from posttrain.data.steps.step import DataStep
from posttrain.data.versions.recipe import step_values
from posttrain.inspect.config_check import DataReport, check_data
from posttrain.loop.config import Config, load_config
from posttrain.loop.stages.label import check_answers
from posttrain.loop.suites import check_suite_files
from posttrain.store.config import CONFIG_FILE
from posttrain.store.errors import EmptyDatabaseError, UserError, suggest
from posttrain.store.secrets import mask_values
from posttrain.store.section import describe_alias
from posttrain.store.yaml_files import read_yaml

app = typer.Typer(name="config", help="Show, search or check posttrain.yaml.", no_args_is_help=True)


@app.command()
def show(
    workspace: WorkspaceOption = CURRENT_FOLDER,
    defaults: Annotated[bool, typer.Option("--defaults", help="Print all keys with defaults, as YAML.")] = False,
    json: JsonOption = False,
) -> None:
    """Print the config with passwords and API keys hidden; with --defaults, every key with its default."""
    if defaults:
        typer.echo(reference(Config))
        return
    # Checked with everything that it names, but printed as the file has it: labels in a file stay a file.
    load_config(workspace)
    config = Config.read(read_yaml(workspace / CONFIG_FILE), CONFIG_FILE)
    values = mask_values(config.model_dump(mode="json"))
    if json:
        print_json(values)
    else:
        typer.echo(yaml.safe_dump(values, sort_keys=False, allow_unicode=True), nl=False)


@app.command()
def keys(
    prefix: Annotated[str, typer.Argument(help="The beginning of the keys, such as train or train.optimizer.")] = "",
    json: JsonOption = False,
) -> None:
    """List the keys of posttrain.yaml with default, type and meaning."""
    names = list(config_keys(Config))
    matching = [entry for entry in names if entry.key.startswith(prefix)]
    if not matching:
        if (alias := Config.key_aliases.get(prefix.rpartition(".")[2])) is not None:
            raise UserError(f"no key begins with `{prefix}`", fix=describe_alias(alias))
        fix = suggest(prefix, [entry.key for entry in names], listed=False) or "posttrain config keys lists all"
        raise UserError(f"no key begins with `{prefix}`", fix=fix)
    if json:
        print_json([asdict(entry) for entry in matching])
        return
    rows = []
    for entry in matching:
        default = "required" if entry.default is None else one_line(entry.default)
        rows.append([entry.key, default, entry.type, entry.meaning])
    print_table("", ["key", "default", "type", "meaning"], rows)


@app.command()
def check(workspace: WorkspaceOption = CURRENT_FOLDER, json: JsonOption = False) -> None:
    """Check the config and the records, columns and labels of every file it names; exit with 2 if a run
    would refuse them.

    Prints a line for each file, and notes on what a run accepts but you may not expect.
    """
    config = load_config(workspace)
    # A workspace that has never run has no store, and so no versions that the config could name.
    stored = (workspace / ".posttrain" / "format.json").is_file()
    try:
        with open_store(workspace) if stored else nullcontext() as store:
            report = check_data(config, workspace, store)
    except EmptyDatabaseError:
        report = check_data(config, workspace, None)
    if json:
        print_json(report.to_json())
    if report.errors:
        for problem in [] if json else report.errors:
            print_error(problem.error())
        raise typer.Exit(2)
    # What the records alone do not tell: functions of suites, and answers of gold items.
    check_answers(config, workspace)
    check_suite_files(config, workspace)
    if not json:
        _print_report(report)


def _print_report(report: DataReport) -> None:
    columns = ["file", "as", "records", "columns", *(["labels"] if report.labels else [])]
    rows = []
    for file in report.files:
        names = [f"{name} (unused)" if name in file.unused else name for name in file.columns]
        labels = f"{len(file.labels):,} of {len(report.labels):,}" if file.role != "pool" else ""
        rows.append(
            [file.name, file.role, f"{file.records:,}", join_names(names), *([labels] if report.labels else [])]
        )
    print_table("", columns, rows)
    for note in report.notes:
        print_line(f"note: {note}")
    print_line("the config is right")


@dataclass(frozen=True)
class ConfigKey:
    """A key of the config: its dotted name, type, default as JSON (None if it is required) and meaning.

    ``N`` in a name stands for a position in a list, ``NAME`` for a name of the user's own.
    """

    key: str
    type: str
    default: str | None
    meaning: str


def config_keys(section: type[BaseModel], prefix: str = "") -> Iterator[ConfigKey]:
    """Yield every key of a section and of the sections in it, in the order of their definition."""
    for name, field in section.model_fields.items():
        key = f"{prefix}{name}"
        meaning = field.description or ""
        if len(kinds := _kinds(field.annotation)) > 1:
            yield ConfigKey(f"{key}.name", "text", _default_text(kinds[0].model_fields["name"].default), meaning)
            yield from _keys_of_kinds(kinds, f"{key}.")
            continue
        inner = _section(field.annotation)
        # A section is a key of its own only if it is off by default: then `null` and a mapping are both values.
        if inner is None or field.default is None:
            default = None if field.is_required() else _default_text(field.get_default(call_default_factory=True))
            yield ConfigKey(key, _type_text(field.annotation), default, meaning)
        if inner is not None:
            yield from config_keys(inner, f"{key}.")
        elif entry := _section_of_list(field.annotation):
            yield from config_keys(entry, f"{key}.N.")
        elif get_origin(field.annotation) is dict and (entry := _section(get_args(field.annotation)[1])):
            yield from config_keys(entry, f"{key}.NAME.")


def _keys_of_kinds(kinds: list[type[BaseModel]], prefix: str) -> Iterator[ConfigKey]:
    """Yields each key but ``name`` of sections that a value may be, with the names of the sections that have it."""
    entries: dict[str, dict[str, list[str]]] = {}
    first: dict[str, ConfigKey] = {}
    for kind in kinds:
        for entry in config_keys(kind, prefix):
            first.setdefault(entry.key, entry)
            entries.setdefault(entry.key, {}).setdefault(entry.meaning, []).append(kind.model_fields["name"].default)
    del entries[f"{prefix}name"]
    for key, meanings in entries.items():
        texts = [f"{', '.join(names)}: {meaning}" for meaning, names in meanings.items()]
        yield replace(first[key], meaning=" ".join(texts))


def _kinds(annotation: Any) -> list[type[BaseModel]]:
    """Returns the sections that a value may be, each with the default of its ``name``; none if there is one at most."""
    parts = get_args(annotation) if get_origin(annotation) in (Union, UnionType) else ()
    sections = [part for part in parts if isinstance(part, type) and issubclass(part, BaseModel)]
    named = [section for section in sections if "name" in section.model_fields]
    return [section for section in named if not section.model_fields["name"].is_required()]


_TYPES = {str: "text", int: "integer", float: "number", bool: "true or false", type(None): "null", Any: "any"}


def _type_text(annotation: Any) -> str:
    """Describes a type as readers of YAML know it."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _type_text(arguments[0])
    if origin is Literal:
        return ", ".join(json_text.dumps(choice).strip('"') for choice in arguments)
    if origin in (Union, UnionType):
        return " or ".join(dict.fromkeys(_type_text(part) for part in arguments))
    if origin in (list, tuple):
        return f"list of {_type_text(arguments[0])}" if arguments else "list"
    if origin is dict or annotation is dict:
        return "mapping"
    if isinstance(annotation, type) and issubclass(annotation, DataStep):
        return "step"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "section"
    return _TYPES.get(annotation) or str(getattr(annotation, "__name__", annotation))


def reference(section: type[BaseModel], indent: int = 0) -> str:
    """Write a section as commented YAML: each key with its default, and its meaning above it."""
    lines: list[str] = []
    pad = " " * indent
    for name, field in section.model_fields.items():
        lines.append(f"{pad}# {field.description}")
        inner = _section(field.annotation)
        if len(kinds := _kinds(field.annotation)) > 1:
            # The first kind is the default; the keys of the others follow as comments.
            lines += [f"{pad}{name}:", reference(kinds[0], indent + 2)]
            for kind in kinds[1:]:
                lines += [f"{pad}# or", *(f"{pad}#   {line}" for line in reference(kind).splitlines())]
        elif inner is not None and field.default is None:
            # Off by default: its keys follow as a comment, to be filled in.
            lines += [f"{pad}{name}: null", *(f"{pad}# {line}" for line in reference(inner, 2).splitlines())]
        elif inner is not None:
            lines += [f"{pad}{name}:", reference(inner, indent + 2)]
        elif (entry := _section_of_list(field.annotation)) and not field.default:
            # Empty by default: the keys of an entry follow as a comment.
            lines += [f"{pad}{name}: []", f"{pad}# - each with"]
            lines += [f"{pad}#   {line}" for line in reference(entry).splitlines()]
        elif field.is_required():
            lines.append(f"{pad}{name}:  # required")
        else:
            lines.append(f"{pad}{name}: {_default_text(field.get_default(call_default_factory=True))}")
    return "\n".join(lines)


def _section(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    if get_origin(annotation) in (Union, UnionType):
        return next((inner for part in get_args(annotation) if (inner := _section(part))), None)
    return None


def _section_of_list(annotation: Any) -> type[BaseModel] | None:
    (inner,) = get_args(annotation) if get_origin(annotation) is list else (None,)
    return _section(inner)


def _default_text(value: Any) -> str:
    # As JSON, which is YAML too: the text can be copied into the file.
    if value is PydanticUndefined:
        return ""
    if isinstance(value, dict):
        value = {
            key: inner.model_dump(mode="json") if isinstance(inner, BaseModel) else inner
            for key, inner in value.items()
        }
    if isinstance(value, list):
        value = [step_values(item) if isinstance(item, DataStep) else item for item in value]
    return json_text.dumps(value, ensure_ascii=False)
