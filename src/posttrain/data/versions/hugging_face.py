"""Records as a folder that ``datasets.load_from_disk`` reads, and that `posttrain.data.reading.tables` takes back."""

import hashlib
import json
import os
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.ipc

from posttrain.data.versions.export import export_rows
from posttrain.store.errors import UserError
from posttrain.store.files import remove_tree, writing


def export_folder(splits: Mapping[str, pa.Table], folder: Path) -> int:
    """Write RECORD tables by split to a new folder; returns how many records.

    One split makes a ``Dataset``, several a ``DatasetDict``; columns are those of the JSONL export.

    Raises:
        UserError: the folder exists, the one above it does not, the disk refused, or shapes would have to be mixed.
    """
    if folder.exists():
        raise UserError("the folder exists already", where=str(folder), fix="remove it or name another")
    if not folder.absolute().parent.is_dir():
        raise UserError("there is no such folder", where=str(folder.parent), fix="make it first")
    unfinished = folder.with_name(f".{folder.name}.{uuid.uuid4().hex[:8]}")
    with writing(folder):
        try:
            for name, table in splits.items():
                _write(table, unfinished / name if len(splits) > 1 else unfinished, name, folder)
            if len(splits) > 1:
                (unfinished / "dataset_dict.json").write_text(json.dumps({"splits": list(splits)}), encoding="utf-8")
            os.rename(unfinished, folder)
        finally:
            remove_tree(unfinished)
    return sum(table.num_rows for table in splits.values())


def _write(records: pa.Table, folder: Path, split: str, shown: Path) -> None:
    folder.mkdir(parents=True)
    rows = [_as_column(row) for row in export_rows(records, shown)]
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
    """A prompt as turns, whatever its form, and meta as JSON text: a column has one type."""
    prompt = row.get("prompt")
    turns = {"prompt": [{"role": "user", "content": prompt}]} if isinstance(prompt, str) else {}
    meta = {"meta": json.dumps(row["meta"], ensure_ascii=False, sort_keys=True)} if "meta" in row else {}
    return {**row, **turns, **meta}
