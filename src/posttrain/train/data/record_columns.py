"""Reads columns of the training records besides prompt and answer: weights, difficulties, kinds, tasks."""

import json
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import pyarrow as pa

from posttrain.store.errors import UserError
from posttrain.train.data.config import PhaseConfig
from posttrain.train.data.encoding import SOURCE_COLUMNS, record_error

_WEIGHT = "train.weight"


def column_values(records: pa.Table, name: str) -> list[Any]:
    """Returns each record's value of a column of the schema or of its file; None if it has none.

    Args:
        records: rows of the record schema.
    """
    if name in records.column_names and name != "meta":
        return list(records[name].to_pylist())
    # Columns of the file that the schema does not have lie in `meta`.
    return [json.loads(meta or "{}").get(name) for meta in records["meta"].to_pylist()]


def category_column(records: pa.Table, name: str, where: str) -> list[str]:
    """Returns each record's kind by a column.

    Raises:
        UserError: a record has no value there.
    """
    values = column_values(records, name)
    for row, value in enumerate(values):
        if value is None:
            raise row_error(records, row, f"it has no `{name}`", fix=f"name a column that all records have in {where}")
    return [str(value) for value in values]


def numeric_column(records: pa.Table, name: str, where: str) -> np.ndarray:
    """float64 [N], a column of numbers, which in a CSV file are text.

    Raises:
        UserError: a record has none there.
    """
    raw = column_values(records, name)
    values = [_to_float(value) for value in raw]
    for row, value in enumerate(raw):
        if values[row] is None:
            numeric = [f"`{column}`" for column in numeric_meta_columns(records.slice(row, 1))]
            fix = f"name a column of numbers in {where}, such as {', '.join(numeric)}" if numeric else None
            fix = fix or f"give the records one, and name it in {where}"
            raise row_error(records, row, f"it has no number `{name}` but `{value}`", fix=fix)
    return np.array(values, np.float64)


def _to_float(value: Any) -> float | None:
    """Converts a number or its text; None if it is neither."""
    if not isinstance(value, int | float | str) or isinstance(value, bool):
        return None
    with suppress(ValueError):
        # CSV has no types, so a number may come as text.
        number = float(value)
        return number if number == number else None
    return None


def numeric_meta_columns(records: pa.Table) -> list[str]:
    """Returns the names of the file's own columns with a number in some record, in alphabetical order."""
    metas = (json.loads(meta or "{}") for meta in records["meta"].to_pylist())
    return sorted({name for meta in metas for name, value in meta.items() if _to_float(value) is not None})


def weight_column(records: pa.Table, name: str) -> np.ndarray:
    """float64 [N], a column of the records' weights in the loss.

    Raises:
        UserError: a record has no number there, or it is below 0 or infinite.
    """
    values = numeric_column(records, name, _WEIGHT)
    if len(wrong := np.flatnonzero(~((values >= 0) & np.isfinite(values)))):
        row = int(wrong[0])
        raise row_error(records, row, f"its weight `{name}` is {values[row]:g}", fix="give it a finite one, 0 or more")
    return values


def record_kinds(phases: Sequence[PhaseConfig], task_column: str | None, records: pa.Table) -> dict[str, list[str]]:
    """Returns each record's kind, for each column that a phase mixes by, and for the one that names its task.

    Args:
        task_column: column of the tasks of gradient surgery; None without.

    Raises:
        UserError: a record has no value there, or each record is a task of its own.
    """
    kinds = {}
    for number, phase in enumerate(phases):
        if phase.mix is not None:
            kinds[phase.mix_by] = category_column(records, phase.mix_by, f"train.phases.{number}.mix_by")
    if task_column is not None:
        where = "train.surgery.by"
        tasks = kinds[task_column] = category_column(records, task_column, where)
        if len(set(tasks)) == len(tasks) > 2:
            fix = "name a column whose values many records share"
            raise UserError(f"every record has another `{task_column}`, and would be a task", where=where, fix=fix)
    return kinds


def check_margins(records: pa.Table, margins: np.ndarray) -> None:
    """Raises a UserError if a pair's ``margin``, float [N] as in `EncodedExample`, is not a number."""
    if len(wrong := np.flatnonzero(~np.isfinite(margins))):
        raise row_error(records, int(wrong[0]), "its `margin` is no number", fix="give all a number, or none")


def row_error(records: pa.Table, row: int, what: str, *, fix: str | None = None) -> UserError:
    """Returns `record_error` of the record of a row."""
    columns = [name for name in ("id", *SOURCE_COLUMNS) if name in records.column_names]
    return record_error(records.select(columns).slice(row, 1).to_pylist()[0], what, fix=fix)
