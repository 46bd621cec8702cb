"""Exports records to a file or a folder that ``datasets.load_from_disk`` reads; reading takes both back unchanged."""

import csv
import hashlib
import io
import json
import os
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet

from posttrain.data.reading.conversion import turns_from_json
from posttrain.data.reading.data_files import DELIMITERS
from posttrain.store.errors import UserError
from posttrain.store.files import check_new_file, disk_errors, remove_tree, write_atomically


def export_file(records: pa.Table, path: Path) -> None:
    """Writes a RECORD table to a new .jsonl, .csv, .tsv or .parquet file.

    JSONL and CSV get the columns ``prompt, completion``, ``prompt, chosen, rejected`` or ``text``, and
    ``group`` and ``meta`` where there are any; a prompt of one user turn becomes its text. Parquet keeps
    RECORD as it is.

    Raises:
        UserError: the file exists, its format is unknown, the folder cannot be written, or JSONL or CSV would
            have to mix shapes.
    """
    check_new_file(path, _WRITERS)
    write_atomically(path, _WRITERS[path.suffix.lower()](records, path))


def _parquet_bytes(records: pa.Table, path: Path) -> bytes:
    sink = pa.BufferOutputStream()
    pyarrow.parquet.write_table(records, sink)
    return bytes(sink.getvalue())


def _jsonl_bytes(records: pa.Table, path: Path) -> bytes:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in export_rows(records, path)).encode()


def _delimited_bytes(records: pa.Table, path: Path) -> bytes:
    rows = [{column: _cell(value) for column, value in row.items()} for row in export_rows(records, path)]
    columns = list(rows[0]) if rows else ["prompt", "completion"]
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, columns, delimiter=DELIMITERS[path.suffix.lower()], quoting=csv.QUOTE_ALL)
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue().encode()


def export_rows(records: pa.Table, path: Path) -> list[dict[str, Any]]:
    """Converts records to objects that all have the same columns."""
    objects = records.to_pylist()
    shapes = {_shape(record) for record in objects}
    # JSONL and CSV readers take the shape from the first row.
    if len(shapes) > 1:
        fix = "export to .parquet, which holds all of them"
        raise UserError(f"the records have the shapes {', '.join(sorted(shapes))}", where=str(path), fix=fix)
    grouped = any(record["group"] is not None for record in objects)
    # A column for all rows or for none: readers of CSV and JSONL expect the same columns everywhere.
    noted = any(record["meta"] not in (None, "{}") for record in objects)
    rows = []
    for record in objects:
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
    # A text that itself parses as messages must stay a list, or reading would take it apart.
    plain = len(turns) == 1 and turns[0]["role"] == "user" and turns_from_json(turns[0]["content"]) is None
    prompt = turns[0]["content"] if plain else turns
    if record["rejected"] is None:
        return {"prompt": prompt, "completion": record["completion"]}
    return {"prompt": prompt, "chosen": record["completion"], "rejected": record["rejected"]}


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


_WRITERS: dict[str, Callable[[pa.Table, Path], bytes]] = {
    ".jsonl": _jsonl_bytes,
    ".csv": _delimited_bytes,
    ".tsv": _delimited_bytes,
    ".parquet": _parquet_bytes,
}


def export_folder(splits: Mapping[str, pa.Table], folder: Path) -> int:
    """Writes RECORD tables by split to a new folder, and returns the number of records.

    One split makes a ``Dataset``, several a ``DatasetDict``; columns are those of the JSONL export.

    Raises:
        UserError: the folder exists, the one above it does not, the disk refused, or shapes would have to be mixed.
    """
    if folder.exists():
        raise UserError("the folder exists already", where=str(folder), fix="remove it or name another")
    if not folder.absolute().parent.is_dir():
        raise UserError("there is no such folder", where=str(folder.parent), fix="make it first")
    # Beside the folder, as only a rename within one file system is atomic.
    unfinished = folder.with_name(f".{folder.name}.{uuid.uuid4().hex[:8]}")
    with disk_errors(folder):
        try:
            for name, table in splits.items():
                _write_split(table, unfinished / name if len(splits) > 1 else unfinished, name, folder)
            if len(splits) > 1:
                (unfinished / "dataset_dict.json").write_text(json.dumps({"splits": list(splits)}), encoding="utf-8")
            # One rename, so that a kill leaves no half-written folder under the name.
            os.rename(unfinished, folder)
        finally:
            remove_tree(unfinished)
    return sum(table.num_rows for table in splits.values())


def _write_split(records: pa.Table, folder: Path, split: str, target: Path) -> None:
    folder.mkdir(parents=True)
    rows = [_as_column(row) for row in export_rows(records, target)]
    table = pa.Table.from_pylist(rows) if rows else pa.table({"prompt": pa.array([], pa.string())})
    file = folder / "data-00000-of-00001.arrow"
    with pyarrow.ipc.new_stream(str(file), table.schema) as stream:
        stream.write_table(table)
    state: dict[str, Any] = {
        "_data_files": [{"filename": file.name}],
        "_fingerprint": hashlib.sha256(file.read_bytes()).hexdigest()[:16],
        "_format_columns": None,
        "_format_kwargs": {},
        "_format_type": None,
        "_output_all_columns": False,
        "_split": split,
    }
    (folder / "state.json").write_text(json.dumps(state, indent=2), encoding="utf-8")
    (folder / "dataset_info.json").write_text("{}", encoding="utf-8")


def _as_column(row: dict[str, Any]) -> dict[str, Any]:
    """Turns prompts into messages and meta into JSON text, as an Arrow column has one type."""
    prompt = row.get("prompt")
    turns = {"prompt": [{"role": "user", "content": prompt}]} if isinstance(prompt, str) else {}
    meta = {"meta": json.dumps(row["meta"], ensure_ascii=False, sort_keys=True)} if "meta" in row else {}
    return {**row, **turns, **meta}
