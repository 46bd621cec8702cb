"""The texts that a record is made of, wherever they stand, and records with those texts changed."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute

from posttrain.data.records.normalise import Field


class Contents(NamedTuple):
    """M texts of one kind in the order of their rows.

    Attributes:
        column: of RECORD, that they stand in.
        texts: large_string [M].
        rows: int64 [M], the row of each.
    """

    column: str
    texts: pa.Array
    rows: npt.NDArray[np.int64]


def contents(table: pa.Table, field: Field = "all") -> Iterator[Contents]:
    """Every text of a RECORD table but nulls: those of all turns, the system's as well, answers and plain text."""
    for name in _columns(field):
        column = table[name].combine_chunks()
        if name == "prompt":
            rows = pa.compute.list_parent_indices(column)
            column = pa.compute.struct_field(pa.compute.list_flatten(column), "content")
        else:
            rows = pa.compute.indices_nonzero(pa.compute.is_valid(column))
            column = column.drop_null()
        yield Contents(name, column.cast(pa.large_string()), np.asarray(rows.to_numpy(), dtype=np.int64))


def texts(record: Mapping[str, Any], field: Field = "all", system: bool = True) -> list[str]:
    """Those of one record.

    Args:
        system: whether the system's turns are among them.
    """
    found: list[str] = []
    for name in _columns(field):
        if name == "prompt":
            turns = record["prompt"] or []
            found += [turn["content"] for turn in turns if system or turn["role"] != "system"]
        elif record[name] is not None:
            found.append(record[name])
    return found


def revised(
    record: Mapping[str, Any], function: Callable[[str], str], field: Field = "all", system: bool = True
) -> dict[str, Any]:
    """What ``function`` makes of the texts of a record: the columns that are to hold something else.

    Args:
        system: whether it is for the system's turns, too.
    """
    found: dict[str, Any] = {}
    for name in _columns(field):
        held = record[name]
        if held is None:
            continue
        if name == "prompt":
            new: Any = [
                {**turn, "content": function(turn["content"])} if system or turn["role"] != "system" else turn
                for turn in held
            ]
        else:
            new = function(held)
        if new != held:
            found[name] = new
    return found


def emptied(values: Mapping[str, Any]) -> str | None:
    """Name of the first of some columns with a text that is empty, such as those that `revised` gives."""
    for name, value in values.items():
        texts = [turn["content"] for turn in value] if name == "prompt" else [value]
        if "" in texts:
            return name
    return None


def _columns(field: Field) -> tuple[str, ...]:
    inputs, answers = ("prompt", "text"), ("completion", "rejected")
    return {"input": inputs, "answer": answers, "all": inputs + answers}[field]
