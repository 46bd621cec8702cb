"""What an inbox gathered, as files of the workspace that are read like any other."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from posttrain.data.drain import Batch
from posttrain.data.feedback import Kind
from posttrain.store.files import make_folder, write_atomically


def bring_home(batch: Batch, folders: Mapping[Kind, Path], columns: Mapping[str, str] | None) -> list[Path]:
    """Write a batch's records into folders by kind; the same batch always gives the same files.

    Args:
        columns: which column of the workspace's files holds what; the records get the same columns.

    Raises:
        UserError: the disk refused.
    """
    written = []
    for kind, file in batch.files.items():
        rows = [_in_columns(json.loads(line), columns or {}) for line in file.read_bytes().splitlines()]
        text = "".join(json.dumps(row, ensure_ascii=False, sort_keys=True) + "\n" for row in rows)
        make_folder(folders[kind])
        target = folders[kind] / file.name
        write_atomically(target, text.encode())
        written.append(target)
    return written


def _in_columns(row: dict[str, Any], columns: Mapping[str, str]) -> dict[str, Any]:
    """The row under the names of ``columns``; of a pair that they have no place for, the better answer."""
    if columns and "chosen" in row and "chosen" not in columns:
        rest = {name: value for name, value in row.items() if name not in ("chosen", "rejected")}
        row = {**rest, "completion": row["chosen"]}
    return {**dict.fromkeys(columns.values()), **{columns.get(name, name): value for name, value in row.items()}}
