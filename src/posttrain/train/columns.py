"""What a data file said about its records besides prompt and answer."""

import json
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from posttrain.store.errors import UserError
from posttrain.train.examples import PLACE, unusable

if TYPE_CHECKING:
    from posttrain.train.config import TrainConfig


_WEIGHT = "train.weight"


def column(records: pa.Table, name: str) -> list[Any]:
    """What each record says under a name, a column of the record schema or one that only its file has; None if nothing.

    Args:
        records: rows of the record schema.
    """
    if name in records.column_names and name != "meta":
        return list(records[name].to_pylist())
    return [json.loads(meta or "{}").get(name) for meta in records["meta"].to_pylist()]


def kinds(records: pa.Table, name: str, where: str) -> list[str]:
    """What each record is by a column.

    Raises:
        UserError: a record says nothing there.
    """
    found = column(records, name)
    for row, value in enumerate(found):
        if value is None:
            raise named(records, row, f"it has no `{name}`", fix=f"name a column that all records have in {where}")
    return [str(value) for value in found]


def numbers(records: pa.Table, name: str, where: str) -> np.ndarray:
    """float64 [N], a column of numbers; those of a CSV file are written in words.

    Raises:
        UserError: a record has none there.
    """
    found = column(records, name)
    values = [_number(value) for value in found]
    for row, value in enumerate(found):
        if values[row] is None:
            here = [f"`{column}`" for column in columns_beside(records.slice(row, 1))]
            fix = f"name a column of numbers in {where}, such as {', '.join(here)}" if here else None
            fix = fix or f"give the records one, and name it in {where}"
            raise named(records, row, f"it has no number `{name}` but `{value}`", fix=fix)
    return np.array(values, np.float64)


def _number(value: Any) -> float | None:
    """The number that a value is or spells; None where it is none."""
    if not isinstance(value, int | float | str) or isinstance(value, bool):
        return None
    with suppress(ValueError):
        number = float(value)
        return number if number == number else None
    return None


def columns_beside(records: pa.Table) -> list[str]:
    """The columns that only the file has and in which some record has a number, in alphabetical order."""
    metas = (json.loads(meta or "{}") for meta in records["meta"].to_pylist())
    return sorted({name for meta in metas for name, value in meta.items() if _number(value) is not None})


def weights(records: pa.Table, name: str) -> np.ndarray:
    """float64 [N], a column of what each record counts in the loss.

    Raises:
        UserError: a record has no number there, or it is below 0 or infinite.
    """
    found = numbers(records, name, _WEIGHT)
    if len(wrong := np.flatnonzero(~((found >= 0) & np.isfinite(found)))):
        row = int(wrong[0])
        raise named(records, row, f"its weight `{name}` is {found[row]:g}", fix="give it a finite one, 0 or more")
    return found


def stage_kinds(config: "TrainConfig", records: pa.Table) -> dict[str, list[str]]:
    """For each column that a stage mixes by, what each record is."""
    found = {}
    for number, stage in enumerate(config.stages):
        if stage.mix is not None:
            found[stage.mix_by] = kinds(records, stage.mix_by, f"train.stages.{number}.mix_by")
    return found


def check_margins(records: pa.Table, margins: np.ndarray) -> None:
    """Raise a UserError where a pair's ``margin``, float [N] as `Example` gives it, is no number."""
    if len(wrong := np.flatnonzero(~np.isfinite(margins))):
        raise named(records, int(wrong[0]), "its `margin` is no number", fix="give all a number, or none")


def named(records: pa.Table, row: int, what: str, *, fix: str | None = None) -> UserError:
    """What is wrong with the record of a row, as `unusable` says it."""
    columns = [name for name in ("id", *PLACE) if name in records.column_names]
    return unusable(records.select(columns).slice(row, 1).to_pylist()[0], what, fix=fix)
