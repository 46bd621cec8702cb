"""The texts of records: one string a record, a column of texts at a time, or records with their texts changed."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute

TextField = Literal["input", "answer", "all"]
"""Which words of a record a step reads: its prompt or text, its answer (both of a preference pair), or all of them."""


def input_texts(table: pa.Table) -> list[str]:
    """What is compared to find like inputs, one text a record: its text, or its turns one a line.

    The system turn is left out: it is the same in a whole file and would make all of it look alike.
    """
    return [
        text if prompt is None else "\n".join(turn["content"] for turn in prompt if turn["role"] != "system")
        for prompt, text in zip(table["prompt"].to_pylist(), table["text"].to_pylist(), strict=True)
    ]


def joined_texts(table: pa.Table, field: TextField = "all") -> list[str]:
    """One text a record, its parts one a line; ``""`` where there are none."""
    inputs = input_texts(table) if field != "answer" else [None] * table.num_rows
    better, worse = (
        table[name].to_pylist() if field != "input" else [None] * table.num_rows for name in ("completion", "rejected")
    )
    return ["\n".join(part for part in parts if part is not None) for parts in zip(inputs, better, worse, strict=True)]


class TextColumn(NamedTuple):
    """M texts of one kind in the order of their rows.

    Attributes:
        column: of RECORD, that they stand in.
        texts: large_string [M].
        rows: int64 [M], the row of each.
    """

    column: str
    texts: pa.Array
    rows: npt.NDArray[np.int64]


def text_columns(table: pa.Table, field: TextField = "all") -> Iterator[TextColumn]:
    """Every text of a RECORD table but nulls: those of all turns, the system's as well, answers and plain text."""
    for name in _columns(field):
        column = table[name].combine_chunks()
        if name == "prompt":
            rows = pa.compute.list_parent_indices(column)
            column = pa.compute.struct_field(pa.compute.list_flatten(column), "content")
        else:
            rows = pa.compute.indices_nonzero(pa.compute.is_valid(column))
            column = column.drop_null()
        yield TextColumn(name, column.cast(pa.large_string()), np.asarray(rows.to_numpy(), dtype=np.int64))


def record_texts(record: Mapping[str, Any], field: TextField = "all", system: bool = True) -> list[str]:
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


def map_texts(
    record: Mapping[str, Any], function: Callable[[str], str], field: TextField = "all", system: bool = True
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


def first_empty(values: Mapping[str, Any]) -> str | None:
    """Name of the first of some columns with a text that is empty, such as those that `map_texts` gives."""
    for name, value in values.items():
        texts = [turn["content"] for turn in value] if name == "prompt" else [value]
        if "" in texts:
            return name
    return None


def _columns(field: TextField) -> tuple[str, ...]:
    inputs, answers = ("prompt", "text"), ("completion", "rejected")
    return {"input": inputs, "answer": answers, "all": inputs + answers}[field]
