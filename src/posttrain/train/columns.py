"""What a data file said about its records besides prompt and answer."""

import json
from typing import Any

import numpy as np
import pyarrow as pa

from posttrain.store.errors import UserError


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
    for id, value in zip(records["id"].to_pylist(), found, strict=True):
        if value is None:
            raise UserError(f"record {id} has no `{name}`", where=where, fix="name a column that all records have")
    return [str(value) for value in found]


def numbers(records: pa.Table, name: str, where: str) -> np.ndarray:
    """float64 [N], a column of numbers.

    Raises:
        UserError: a record has none there.
    """
    found = column(records, name)
    for id, value in zip(records["id"].to_pylist(), found, strict=True):
        if isinstance(value, bool) or not isinstance(value, int | float) or value != value:
            raise UserError(f"record {id} has no number `{name}` but `{value}`", where=where)
    return np.array(found, np.float64)
