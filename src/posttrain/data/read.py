"""From a file in any accepted format and shape to tables of RECORD."""

import json
import math
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa

from posttrain.data.files import DELIMITERS, rows, uniform
from posttrain.data.normalise import input_id, record_id
from posttrain.data.problem import Problem
from posttrain.data.schema import records
from posttrain.data.shapes import SHAPES, BadRecord, Shape, shape_of
from posttrain.store.nearest import did_you_mean, nearest

BATCH_RECORDS = 8192

Record = dict[str, Any]


def read(
    path: Path,
    columns: Mapping[str, str] | None = None,
    *,
    name: str | None = None,
    answers: bool = True,
    batch: int = BATCH_RECORDS,
) -> Iterator[pa.Table]:
    """Stream a file as tables of RECORD with up to ``batch`` rows, in file order.

    Args:
        path: .jsonl, .json, .csv, .tsv, .parquet, or a Hugging Face dataset folder.
        columns: which column holds what, such as ``{"prompt": "text", "completion": "category"}``.
        name: what ``source`` and errors call the file; ``path`` as given when None.
        answers: whether a mapped ``completion`` column must be there (a pool may lack it).

    Raises:
        UserError: on the first bad record, with file and line.
    """
    waiting: list[Record] = []
    for found in scan(path, columns, name=name, answers=answers):
        if isinstance(found, Problem):
            raise found.error()
        waiting.append(found)
        if len(waiting) == batch:
            yield records(waiting)
            waiting = []
    if waiting:
        yield records(waiting)


def scan(
    path: Path, columns: Mapping[str, str] | None = None, *, name: str | None = None, answers: bool = True
) -> Iterator[Record | Problem]:
    """Every record of a file, and a problem in the place of each bad one; the arguments of :func:`read`."""
    source = str(path) if name is None else name
    same_columns = uniform(path)
    delimited = path.suffix.lower() in DELIMITERS
    first: tuple[Shape, int] | None = None
    anything = False
    for row in rows(path, source):
        anything = True
        if isinstance(row, Problem):
            yield row
            continue
        try:
            values = _renamed(row.values, columns, answers)
            shape = _shape(values, row.values, columns)
        except BadRecord as bad:
            yield Problem(source, 1 if same_columns else row.line, bad.kind, bad.message, bad.fix)
            if same_columns:
                return
            continue
        first = first or (shape, row.line)
        if shape is not first[0]:
            message = f"has the shape `{shape.name}`, but line {first[1]} has the shape `{first[0].name}`"
            yield Problem(source, row.line, "mixed shapes", message, "keep one shape in one file")
            continue
        try:
            others = _others(row.values, shape, columns)
            yield _record(_unpacked(values) if delimited else values, shape, source, row.line, others)
        except BadRecord as bad:
            yield Problem(source, row.line, bad.kind, bad.message, bad.fix)
    if not anything:
        yield Problem(
            source, None, "empty file", "the file holds no records", "put records into it, or name another file"
        )


def _renamed(values: Record, columns: Mapping[str, str] | None, answers: bool) -> Record:
    """``values`` under the names that shapes know; what is not mapped keeps its name out of their way."""
    if not columns:
        return values
    for target, column in columns.items():
        if column not in values and (answers or target != "completion"):
            message = f"there is no column `{column}`; the columns are {', '.join(values)}"
            raise BadRecord("missing column", message, did_you_mean(column, values))
    return {target: values[column] for target, column in columns.items() if column in values}


def _shape(values: Record, given: Record, columns: Mapping[str, str] | None) -> Shape:
    shape = shape_of(values)
    if shape is not None:
        return shape
    if columns:
        fix = "map `prompt`, `messages`, `conversations`, `chosen` and `rejected`, or `text`"
        raise BadRecord("unknown shape", f"`columns` maps only {', '.join(columns)}", fix)
    message = f"the columns {', '.join(given) or '(none)'} are no shape that we know"
    wanted = {need for shape in SHAPES for need in shape.needs}
    raise BadRecord("unknown shape", message, _suggestion(given, wanted))


def _suggestion(given: Collection[str], wanted: Collection[str]) -> str:
    for column in given:
        if near := nearest(column, wanted, likeness=0.75):
            return f"did you mean `{near}` by `{column}`?"
    return "say in `columns` which column holds what, such as {prompt: question, completion: answer}"


def _unpacked(values: Record) -> Record:
    """``values`` of a delimited file, which can hold lists of turns only as JSON text."""
    packed = {column for column in ("prompt", "messages", "conversations") if column in values}
    return {**values, **{column: turns_in(values[column]) or values[column] for column in packed}}


def turns_in(text: str) -> list[Mapping[str, Any]] | None:
    """The turns that a cell of a delimited file holds as JSON text; None for any other text."""
    if not text.startswith("["):
        return None
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, list) or not value:
        return None
    return value if all(isinstance(turn, dict) and {"role", "from"} & set(turn) for turn in value) else None


def _record(values: Record, shape: Shape, source: str, line: int, others: Record) -> Record:
    content = shape.convert(values)
    return {
        "id": record_id(content.prompt, content.completion, content.rejected, content.text),
        "input_id": input_id(content.prompt, content.text),
        "prompt": content.prompt,
        "completion": content.completion,
        "rejected": content.rejected,
        "text": content.text,
        "group": _group(values.get("group")),
        "source": source,
        "line": line,
        "meta": _meta({**others, **content.extra}),
    }


def _group(value: Any) -> str | None:
    if value is None or isinstance(value, str):
        return value or None
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    raise BadRecord("not text", f"the group `{value}` is neither text nor a whole number")


def _others(values: Record, shape: Shape, columns: Mapping[str, str] | None) -> Record:
    """The columns that neither the shape nor the group reads."""
    names = [*shape.uses, "group"]
    read = {columns[name] for name in names if name in columns} if columns else set(names)
    return {column: value for column, value in values.items() if column not in read}


def _meta(others: Record) -> str:
    """Canonical JSON of ``others``; a column ``meta`` that holds an object is poured in."""
    given = others.get("meta")
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except (ValueError, RecursionError):
            given = None
    if isinstance(given, dict):
        others = {**given, **{column: value for column, value in others.items() if column != "meta"}}
    return json.dumps(_plain(others), ensure_ascii=False, sort_keys=True)


def _plain(value: Any) -> Any:
    """``value`` as JSON can hold it; times, bytes and numbers that are not finite become text."""
    if isinstance(value, dict):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_plain(inner) for inner in value]
    if value is None or isinstance(value, str | bool | int) or (isinstance(value, float) and math.isfinite(value)):
        return value
    return str(value)
