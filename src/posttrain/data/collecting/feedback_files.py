"""What an inbox gathered, as files of the workspace that are read like any other."""

import json
import logging
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from posttrain.data.collecting.drain import Batch
from posttrain.data.collecting.feedback import Kind
from posttrain.data.reading.conversion import Conversion
from posttrain.data.reading.problem import Problem, shortened, unknown_label
from posttrain.data.reading.row import Row
from posttrain.store.files import make_folder, write_atomically

log = logging.getLogger("posttrain")


def bring_home(
    batch: Batch, folders: Mapping[Kind, Path], columns: Mapping[str, str] | None, labels: Collection[str] = ()
) -> list[Path]:
    """Write a batch's records into folders by kind; the same batch always gives the same files.

    A record that reading would refuse, or whose answer is outside the label set, is set aside in `Batch.rejected` with
    its ``reason``, and said: one bad answer must not stop all others.

    Args:
        columns: which column of the workspace's files holds what; the records get the same columns.
        labels: the closed label set; empty for open-ended answers.

    Raises:
        UserError: the disk refused.
    """
    written = []
    for kind, file in batch.files.items():
        kept, refused = [], []
        for line in file.read_bytes().splitlines():
            given = json.loads(line)
            row = _in_columns(given, columns or {})
            if problem := _problem(row, file.name, columns, labels):
                reason = f"{problem.message}; {problem.fix}" if problem.fix else problem.message
                refused.append({**given, "reason": reason})
            else:
                kept.append(row)
        target = folders[kind] / file.name
        if kept:
            make_folder(folders[kind])
            _write(target, kept)
            written.append(target)
        else:
            target.unlink(missing_ok=True)
        if refused:
            aside = batch.rejected(kind)
            make_folder(aside.parent)
            _write(aside, refused)
            first = shortened(refused[0]["meta"]["feedback"]["id"])
            told = (aside, len(refused), len(kept) + len(refused), kind, first, refused[0]["reason"])
            log.warning("%s: %d of %d entries (%s) are set aside; the first, `%s`: %s", *told)
    return written


def _write(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    text = "".join(json.dumps(row, ensure_ascii=False, sort_keys=True) + "\n" for row in rows)
    write_atomically(path, text.encode())


def _problem(
    row: dict[str, Any], name: str, columns: Mapping[str, str] | None, labels: Collection[str]
) -> Problem | None:
    """Why reading would refuse the row; None where it would not."""
    for found in Conversion(name, columns, answers=False)([Row(1, row)]):
        if isinstance(found, Problem):
            return found
        if labels and found["completion"] is not None and found["completion"] not in labels:
            return unknown_label(found["completion"], labels, name, 1)
    return None


def _in_columns(row: dict[str, Any], columns: Mapping[str, str]) -> dict[str, Any]:
    """The row under the names of ``columns``; of a pair that they have no place for, the better answer."""
    if columns and "chosen" in row and "chosen" not in columns:
        rest = {name: value for name, value in row.items() if name not in ("chosen", "rejected")}
        row = {**rest, "completion": row["chosen"]}
    return {**dict.fromkeys(columns.values()), **{columns.get(name, name): value for name, value in row.items()}}
