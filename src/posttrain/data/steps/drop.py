"""Removes the records that a file names."""

from functools import cache
from pathlib import Path
from typing import Any, ClassVar, Self

import pyarrow as pa
from pydantic import Field

from posttrain.data.reading.formats import read_rows
from posttrain.data.reading.rows import Problem
from posttrain.data.records.outcome import Outcome, Rejection, reject_rows
from posttrain.data.steps.resources import check_exists, file_key, file_state, resolve_path
from posttrain.data.steps.step import RowStep
from posttrain.store.errors import UserError
from posttrain.store.text_files import read_text

_NAMES = ("id", "input_id")
_YES, _NO = ("true", "1", "yes"), ("false", "0", "no", "", "none")


class Drop(RowStep):
    """Removes the records that a file names, by their id or by the id of their input.

    The file is a text with an id a line, or a table (.csv, .tsv, .jsonl, .json, .parquet) with a column `id` or
    `input_id`, such as `posttrain select value --out` writes. The id of its input removes a record whatever its
    label, and keeps it from being labelled again.
    """

    name: ClassVar[str] = "drop"
    every_round: ClassVar[bool] = True

    file: str = Field(description="File that names the records.")
    only: str | None = Field(
        "harmful", description="Column of true and false that selects rows, if the file has it; null: all rows."
    )

    def located(self, root: Path) -> Self:
        return self.model_copy(update={"file": resolve_path(root, self.file)})

    def check(self) -> None:
        check_exists(self.file, "drop.file")
        self._lines_by_id()

    def key(self) -> dict[str, Any]:
        return {**super().key(), "file": file_key(self.file)}

    def apply(self, table: pa.Table) -> Outcome:
        lines, file = self._lines_by_id(), Path(self.file).name
        rejections = {
            row: Rejection("named", f"{file} names it in line {line}")
            for row, ids in enumerate(zip(*(table[name].to_pylist() for name in _NAMES), strict=True))
            if (line := next((lines[record_id] for record_id in ids if record_id in lines), None)) is not None
        }
        return reject_rows(table, self.name, rejections)

    def _lines_by_id(self) -> dict[str, int]:
        # The file's state is part of the cache's key, so that an edited file is read again.
        return _named_ids(self.file, self.only, file_state(self.file))


@cache
def _named_ids(file: str, only: str | None, state: str) -> dict[str, int]:
    """Returns the line of each id in a file, the first if it occurs twice.

    Raises:
        UserError: the file cannot be read, has no ids, or has neither true nor false for one.
    """
    path, lines = Path(file), dict[str, int]()
    if path.suffix.lower() in (".txt", ""):
        for number, text in enumerate(read_text(path, path.name).splitlines(), 1):
            if text.strip():
                lines.setdefault(text.strip(), number)
        return lines
    for row in read_rows(path, path.name):
        # A line that is skipped could be the one that names a harmful record.
        if isinstance(row, Problem):
            raise row.error()
        ids = [str(row.values[name]) for name in _NAMES if row.values.get(name)]
        if not ids:
            fix = "give the file a column `id` or `input_id`"
            raise UserError("names no record", where=f"{path.name}:{row.line}", fix=fix)
        if only is None or only not in row.values or _is_true(row.values[only], only, f"{path.name}:{row.line}"):
            for record_id in ids:
                lines.setdefault(record_id, row.line)
    return lines


def _is_true(value: Any, column: str, where: str) -> bool:
    text = str(value).strip().lower()
    if text not in (*_YES, *_NO):
        raise UserError(f"`{column}` is `{value}`", where=where, fix="true or false")
    return text in _YES
