"""Proposes a config for the user's own files: columns, labels and template."""

import json
import os
from collections import Counter
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import yaml

from posttrain.data.reading.columns import Columns, detect_columns, is_closed_set
from posttrain.data.reading.data_files import locate_file
from posttrain.data.reading.formats import read_rows
from posttrain.data.reading.reader import scan_records
from posttrain.data.reading.rows import Problem, Row, join_names
from posttrain.inspect.config_check import DataReport, check_data
from posttrain.loop.config import Config
from posttrain.store.config import CONFIG_FILE
from posttrain.store.errors import UserError
from posttrain.store.message import counted
from posttrain.store.yaml_files import parse_yaml

LABELS_FILE = "labels.txt"

TEST_SHARE = 0.2
"""Share of the labelled records that are held out for the test where no file of test records is named."""

_PER_ROUND = 100

_FEW_ANSWERS = 50  # below, few labels of a closed set occur several times

_FIX = "say which with --prompt COLUMN --label COLUMN"


@dataclass(frozen=True)
class DataFiles:
    """The user's files, as they were named, relative to the current folder.

    Args:
        test: Records with answers to measure by; None: a share of ``labelled`` is held out.
        pool: Inputs without answers; None: none.
        labelled: Records with answers to train on; None: none.
    """

    test: str | None
    pool: str | None
    labelled: str | None


@dataclass(frozen=True)
class Proposal:
    """A config for the user's files.

    Args:
        template: ``classify`` or ``answer``.
        config: The text of posttrain.yaml.
        labels: The closed label set, sorted; empty for free text.
        report: What the files hold.
        lines: What was concluded, a line each.
    """

    template: str
    config: str
    labels: list[str]
    report: DataReport
    lines: list[str]


def propose_config(
    files: DataFiles, user_columns: dict[str, str], folder: Path, template: str | None = None
) -> Proposal:
    """Reads the files and proposes a config that `check_data` accepts.

    Args:
        user_columns: Columns that the user named: of ``prompt``, ``completion`` or both.
        folder: The workspace's folder, which need not exist; the config names the files from there.
        template: None: ``classify`` where the answers are a small closed set, else ``answer``.

    Raises:
        UserError: a file cannot be read, its columns are ambiguous or missing, or no record has an answer.
    """
    answered = files.test or files.labelled
    if answered is None:
        fix = "--test FILE with answers to measure by, or --labelled FILE to hold a share of it out"
        raise UserError("no file of records with answers is named", where="--test", fix=fix)
    if files.pool is None and files.labelled is None:
        fix = "--pool FILE with inputs, or --labelled FILE with records to train on"
        raise UserError("no file of records to learn from is named", where="--pool", fix=fix)
    columns = detect_columns(locate_file(Path(), answered), answered, _FIX, user_columns)
    if columns.shape is not None and columns.shape.name == "preference":
        fix = f"posttrain init {folder}, and `task: {{kind: preference}}` in its {CONFIG_FILE}"
        raise UserError("the records are pairs of answers, and not prompts with one", where=answered, fix=fix)
    for name in _names(files):
        _require_columns(name, answered, columns)
    answers = [_answers(name, columns, pool=name == files.pool) for name in _names(files)]
    known = sum(answers, Counter[str]())
    closed = template == "classify" or (template is None and is_closed_set(known))
    guessed = template is None and not closed and known.total() < _FEW_ANSWERS
    template = template or ("classify" if closed else "answer")
    labels = sorted(known) if closed else []
    values = _data_values(files, columns)
    report = _check(values, labels)
    if report.errors:
        raise report.errors[0].error()
    records = {file.role: file.records for file in report.files}
    config = _format(template, values | _relative(files, folder), records)
    conclusions = _conclusions(files, columns, report, labels)
    if guessed:
        conclusions.append(
            f"note: {known.total()} answers are too few to know labels from free text; if they are labels, add "
            "--template classify"
        )
    return Proposal(template, config, labels, report, conclusions)


def _names(files: DataFiles) -> list[str]:
    return [name for name in (files.test, files.labelled, files.pool) if name is not None]


def _require_columns(name: str, answered: str, columns: Columns) -> None:
    """Raises a UserError if a file lacks the column of prompts, which has one name in all files of a workspace."""
    first = next(read_rows(locate_file(Path(), name), name), None)
    prompt = (columns.mapping or {}).get("prompt")
    if isinstance(first, Row) and prompt is not None and prompt not in first.values:
        what = f"the prompts are in `{prompt}` of {answered}, and here are the columns {join_names(list(first.values))}"
        raise UserError(what, where=name, fix="give the column one name in all files")


def _answers(name: str, columns: Columns, *, pool: bool) -> Counter[str]:
    """Counts the answers in a file; a pool may have none, and those that it has are labels too."""
    counts: Counter[str] = Counter()
    for item in scan_records(locate_file(Path(), name), columns.mapping, name=name, answers=not pool):
        if not isinstance(item, Problem) and item["completion"] is not None:
            counts[item["completion"]] += 1
    return counts


def _data_values(files: DataFiles, columns: Columns) -> dict[str, Any]:
    values: dict[str, Any] = {}
    if files.pool is not None:
        values["pool"] = files.pool
    values["test"] = TEST_SHARE if files.test is None else files.test
    if files.labelled is not None:
        values["labelled"] = files.labelled
    if columns.mapping is not None:
        values["columns"] = columns.mapping
    return values


def _relative(files: DataFiles, folder: Path) -> dict[str, str]:
    """Returns the files' names as they are seen from the workspace; absolute ones stay."""
    names = {key: getattr(files, key) for key in ("pool", "test", "labelled") if getattr(files, key) is not None}
    return {
        key: name if "://" in name or name.startswith(("/", "~")) else os.path.relpath(name, folder)
        for key, name in names.items()
    }


def _check(data: dict[str, Any], labels: list[str]) -> DataReport:
    values: dict[str, Any] = {"model": "tiny", "data": data, "task": {"labels": labels or None}}
    config = Config.read(values, CONFIG_FILE)
    # Before anything is written, so from the current folder, as the user named the files.
    return check_data(config, Path(), None)


def _format(template: str, data: dict[str, Any], records: dict[str, int]) -> str:
    """Writes the template with the section `data` of these values."""
    comments = {
        "pool": "inputs; answers in them are hidden",
        "labelled": "records with answers, trained on from round 1",
        "test": "records with answers to measure by; never trained on",
    }
    section = ["data:"]
    for key, value in data.items():
        text = f"  {key}: {_flow(value)}"
        comment = comments.get(key)
        if isinstance(value, float):
            comment = "the share of `labelled` that is held out to measure by"
        section.append(f"{text:<30} # {comment}" if comment else text)
    lines: list[str] = []
    inside = False
    for line in _template(template).splitlines():
        inside = line == "data:" or (inside and line.startswith(" "))
        if line == "data:":
            lines += section
        elif line.startswith("  per_round:"):
            # A pool smaller than its rounds would end the loop in its first one.
            rounds = 3
            lines.append(f"  per_round: {max(1, min(_PER_ROUND, records.get('pool', _PER_ROUND * rounds) // rounds))}")
        elif not inside:
            lines.append(line)
    return "\n".join(lines) + "\n"


def _template(name: str) -> str:
    return (resources.files("posttrain.cli") / "templates" / f"{name}.yaml").read_text("utf-8")


def _flow(value: Any) -> str:
    """Writes a value as YAML on one line."""
    text = yaml.safe_dump(value, default_flow_style=True, sort_keys=False, allow_unicode=True, width=10**6)
    line = text.removesuffix("\n").removesuffix("\n...")
    # A name that YAML would write over lines is quoted as JSON, which YAML reads too.
    return line if "\n" not in line and parse_yaml(line, CONFIG_FILE) == value else json.dumps(value)


def _conclusions(files: DataFiles, columns: Columns, report: DataReport, labels: list[str]) -> list[str]:
    lines = []
    for file in report.files:
        if columns.mapping is not None:
            parts = [f"prompts in `{columns.mapping['prompt']}`"]
            has_answers = columns.mapping["completion"] in file.columns
            answers = f"`{columns.mapping['completion']}`"
        else:
            parts = [f"shape {columns.shape.name if columns.shape else ''}"]
            has_answers, answers = bool(file.labels), "its shape"
        if file.role != "pool":
            different = f"{len(file.labels):,} different {'labels' if labels else 'answers'}"
            parts.append(f"answers in {answers} ({different})")
        elif has_answers:
            parts.append(f"answers in {answers} are hidden; name it as --labelled to train on them")
        if file.unused:
            parts.append(f"not used: {join_names(file.unused)}")
        lines.append(f"{file.name}: {file.role}, {counted(file.records, 'record')}, {', '.join(parts)}")
    return lines + [f"note: {note}" for note in report.notes]
