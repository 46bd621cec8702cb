"""Reads columns of the training records besides prompt and answer: weights, difficulties, kinds."""

import json
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from posttrain.store.errors import UserError
from posttrain.train.data.encoding import SOURCE_COLUMNS, record_error

if TYPE_CHECKING:
    from posttrain.train.config import TrainConfig


_WEIGHT = "train.weight"


def column_values(records: pa.Table, name: str) -> list[Any]:
    """What each record says under a name, a column of the record schema or one that only its file has; None if nothing.

    Args:
        records: rows of the record schema.
    """
    if name in records.column_names and name != "meta":
        return list(records[name].to_pylist())
    return [json.loads(meta or "{}").get(name) for meta in records["meta"].to_pylist()]


def category_column(records: pa.Table, name: str, where: str) -> list[str]:
    """What each record is by a column.

    Raises:
        UserError: a record says nothing there.
    """
    found = column_values(records, name)
    for row, value in enumerate(found):
        if value is None:
            raise row_error(records, row, f"it has no `{name}`", fix=f"name a column that all records have in {where}")
    return [str(value) for value in found]


def numeric_column(records: pa.Table, name: str, where: str) -> np.ndarray:
    """float64 [N], a column of numbers; those of a CSV file are written in words.

    Raises:
        UserError: a record has none there.
    """
    found = column_values(records, name)
    values = [_to_float(value) for value in found]
    for row, value in enumerate(found):
        if values[row] is None:
            here = [f"`{column}`" for column in numeric_meta_columns(records.slice(row, 1))]
            fix = f"name a column of numbers in {where}, such as {', '.join(here)}" if here else None
            fix = fix or f"give the records one, and name it in {where}"
            raise row_error(records, row, f"it has no number `{name}` but `{value}`", fix=fix)
    return np.array(values, np.float64)


def _to_float(value: Any) -> float | None:
    """The number that a value is or spells; None where it is none."""
    if not isinstance(value, int | float | str) or isinstance(value, bool):
        return None
    with suppress(ValueError):
        number = float(value)
        return number if number == number else None
    return None


def numeric_meta_columns(records: pa.Table) -> list[str]:
    """The columns that only the file has and in which some record has a number, in alphabetical order."""
    metas = (json.loads(meta or "{}") for meta in records["meta"].to_pylist())
    return sorted({name for meta in metas for name, value in meta.items() if _to_float(value) is not None})


def weight_column(records: pa.Table, name: str) -> np.ndarray:
    """float64 [N], a column of what each record counts in the loss.

    Raises:
        UserError: a record has no number there, or it is below 0 or infinite.
    """
    found = numeric_column(records, name, _WEIGHT)
    if len(wrong := np.flatnonzero(~((found >= 0) & np.isfinite(found)))):
        row = int(wrong[0])
        raise row_error(records, row, f"its weight `{name}` is {found[row]:g}", fix="give it a finite one, 0 or more")
    return found


def mix_kinds(config: "TrainConfig", records: pa.Table) -> dict[str, list[str]]:
    """For each column that a stage mixes by, what each record is."""
    found = {}
    for number, stage in enumerate(config.stages):
        if stage.mix is not None:
            found[stage.mix_by] = category_column(records, stage.mix_by, f"train.stages.{number}.mix_by")
    return found


def check_margins(records: pa.Table, margins: np.ndarray) -> None:
    """Raise a UserError where a pair's ``margin``, float [N] as `Example` gives it, is no number."""
    if len(wrong := np.flatnonzero(~np.isfinite(margins))):
        raise row_error(records, int(wrong[0]), "its `margin` is no number", fix="give all a number, or none")


def row_error(records: pa.Table, row: int, what: str, *, fix: str | None = None) -> UserError:
    """What is wrong with the record of a row, as `record_error` says it."""
    columns = [name for name in ("id", *SOURCE_COLUMNS) if name in records.column_names]
    return record_error(records.select(columns).slice(row, 1).to_pylist()[0], what, fix=fix)
