"""Records as a file for other programs, in a shape that :mod:`posttrain.data.reading.tables` takes back unchanged."""

import csv
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet

from posttrain.data.reading.files import DELIMITERS
from posttrain.data.reading.tables import turns_in
from posttrain.store.errors import UserError
from posttrain.store.files import check_new, write_atomically


def export(records: pa.Table, path: Path) -> None:
    """Write a RECORD table to a new .jsonl, .csv, .tsv or .parquet file.

    JSONL and CSV get the columns ``prompt, completion``, ``prompt, chosen, rejected`` or ``text``, and
    ``group`` and ``meta`` where there are any; a prompt of one user turn becomes its text. Parquet keeps
    RECORD as it is.

    Raises:
        UserError: the file exists, its format is unknown, the folder cannot be written, or JSONL or CSV would
            have to mix shapes.
    """
    check_new(path, _WRITERS)
    write_atomically(path, _WRITERS[path.suffix.lower()](records, path))


def _parquet(records: pa.Table, path: Path) -> bytes:
    sink = pa.BufferOutputStream()
    pyarrow.parquet.write_table(records, sink)
    return bytes(sink.getvalue())


def _jsonl(records: pa.Table, path: Path) -> bytes:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in export_rows(records, path)).encode()


def _delimited(records: pa.Table, path: Path) -> bytes:
    rows = [{column: _cell(value) for column, value in row.items()} for row in export_rows(records, path)]
    columns = list(rows[0]) if rows else ["prompt", "completion"]
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, columns, delimiter=DELIMITERS[path.suffix.lower()], quoting=csv.QUOTE_ALL)
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue().encode()


def export_rows(records: pa.Table, path: Path) -> list[dict[str, Any]]:
    """The records as objects that all have the same columns."""
    given = records.to_pylist()
    shapes = {_shape(record) for record in given}
    if len(shapes) > 1:
        fix = "export to .parquet, which holds all of them"
        raise UserError(f"the records have the shapes {', '.join(sorted(shapes))}", where=str(path), fix=fix)
    grouped = any(record["group"] is not None for record in given)
    noted = any(record["meta"] not in (None, "{}") for record in given)
    rows = []
    for record in given:
        row = _content(record)
        if grouped:
            row["group"] = record["group"]
        if noted:
            row["meta"] = json.loads(record["meta"] or "{}")
        rows.append(row)
    return rows


def _shape(record: dict[str, Any]) -> str:
    if record["prompt"] is None:
        return "text"
    return "prompt" if record["rejected"] is None else "preference"


def _content(record: dict[str, Any]) -> dict[str, Any]:
    if record["prompt"] is None:
        return {"text": record["text"]}
    turns = record["prompt"]
    plain = len(turns) == 1 and turns[0]["role"] == "user" and turns_in(turns[0]["content"]) is None
    prompt = turns[0]["content"] if plain else turns
    if record["rejected"] is None:
        return {"prompt": prompt, "completion": record["completion"]}
    return {"prompt": prompt, "chosen": record["completion"], "rejected": record["rejected"]}


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


_WRITERS: dict[str, Callable[[pa.Table, Path], bytes]] = {
    ".jsonl": _jsonl,
    ".csv": _delimited,
    ".tsv": _delimited,
    ".parquet": _parquet,
}
