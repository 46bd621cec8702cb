"""Reads columns of the training records besides prompt and answer: weights, difficulties, kinds, tasks, margins."""

import json
from collections.abc import Sequence
from contextlib import suppress
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa

from posttrain.store.errors import UserError
from posttrain.train.data.config import PhaseConfig
from posttrain.train.data.encoding import SOURCE_COLUMNS, record_error

_WEIGHT = "train.weight"


class RecordColumns:
    """The columns of records by name: those of the schema, and those of the records' own file.

    Args:
        records: rows of the record schema.
    """

    def __init__(self, records: pa.Table) -> None:
        self.records = records

    def values(self, name: str) -> list[Any]:
        """Returns each record's value of a column; None if it has none."""
        if name in self.records.column_names and name != "meta":
            return list(self.records[name].to_pylist())
        return [meta.get(name) for meta in self._metas]

    def categories(self, name: str, where: str) -> list[str]:
        """Returns each record's kind by a column.

        Raises:
            UserError: a record has no value there.
        """
        values = self.values(name)
        for row, value in enumerate(values):
            if value is None:
                fix = f"name a column that all records have in {where}"
                raise row_error(self.records, row, f"it has no `{name}`", fix=fix)
        return [str(value) for value in values]

    def numbers(self, name: str, where: str) -> np.ndarray:
        """float64 [N], a column of numbers, which in a CSV file are text.

        Raises:
            UserError: a record has none there.
        """
        raw = self.values(name)
        values = [_to_float(value) for value in raw]
        for row, value in enumerate(raw):
            if values[row] is None:
                numeric = [f"`{column}`" for column in RecordColumns(self.records.slice(row, 1)).numeric_names()]
                fix = f"name a column of numbers in {where}, such as {', '.join(numeric)}" if numeric else None
                fix = fix or f"give the records one, and name it in {where}"
                raise row_error(self.records, row, f"it has no number `{name}` but `{value}`", fix=fix)
        return np.array(values, np.float64)

    def numeric_names(self) -> list[str]:
        """Returns the names of the file's own columns with a number in some record, in alphabetical order."""
        return sorted({name for meta in self._metas for name, value in meta.items() if _to_float(value) is not None})

    def weights(self, name: str) -> np.ndarray:
        """float64 [N], a column of the records' weights in the loss.

        Raises:
            UserError: a record has no number there, or it is below 0 or infinite.
        """
        values = self.numbers(name, _WEIGHT)
        if len(wrong := np.flatnonzero(~((values >= 0) & np.isfinite(values)))):
            row = int(wrong[0])
            what = f"its weight `{name}` is {values[row]:g}"
            raise row_error(self.records, row, what, fix="give it a finite one, 0 or more")
        return values

    def margins(self) -> np.ndarray:
        """float64 [N], how much better the chosen answer of each pair is (``margin``); 0 if missing.

        Raises:
            UserError: a record's margin is not a finite number.
        """
        values = [0.0 if value is None else _to_float(value) for value in self.values("margin")]
        margins = np.array([np.nan if value is None else value for value in values], np.float64)
        if len(wrong := np.flatnonzero(~np.isfinite(margins))):
            fix = "give all a number, or none"
            raise row_error(self.records, int(wrong[0]), "its `margin` is not a number", fix=fix)
        return margins

    def kinds(self, phases: Sequence[PhaseConfig], task_column: str | None) -> dict[str, list[str]]:
        """Returns each record's kind, for each column that a phase mixes by, and for the one that names its task.

        Args:
            task_column: column of the tasks of gradient surgery; None without.

        Raises:
            UserError: a record has no value there, or each record is a task of its own.
        """
        kinds = {}
        for number, phase in enumerate(phases):
            if phase.mix is not None:
                kinds[phase.mix_by] = self.categories(phase.mix_by, f"train.phases.{number}.mix_by")
        if task_column is not None:
            where = "train.surgery.by"
            tasks = kinds[task_column] = self.categories(task_column, where)
            if len(set(tasks)) == len(tasks) > 2:
                fix = "name a column whose values many records share"
                raise UserError(f"every record has another `{task_column}`, and would be a task", where=where, fix=fix)
        return kinds

    @cached_property
    def _metas(self) -> list[dict[str, Any]]:
        # Columns of the file that the schema does not have lie in `meta`.
        return [json.loads(meta or "{}") for meta in self.records["meta"].to_pylist()]


def _to_float(value: Any) -> float | None:
    """Converts a number or its text; None if it is neither."""
    if not isinstance(value, int | float | str) or isinstance(value, bool):
        return None
    with suppress(ValueError):
        # CSV has no types, so a number may come as text.
        number = float(value)
        return number if number == number else None
    return None


def row_error(records: pa.Table, row: int, what: str, *, fix: str | None = None) -> UserError:
    """Returns `record_error` of the record of a row."""
    columns = [name for name in ("id", *SOURCE_COLUMNS) if name in records.column_names]
    return record_error(records.select(columns).slice(row, 1).to_pylist()[0], what, fix=fix)
