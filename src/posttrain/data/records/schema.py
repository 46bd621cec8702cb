"""The Arrow schemas of records and of the tables that steps write about them, and the texts in a table of records."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute

TextField = Literal["input", "answer", "all"]
"""The part of a record that a step reads: the prompt or text, the answer (both of a preference pair), or all."""


TURN = pa.struct([("role", pa.string()), ("content", pa.string())])

RECORD: pa.Schema = pa.schema(
    [
        ("id", pa.string()),
        ("input_id", pa.string()),
        ("prompt", pa.list_(TURN)),
        ("completion", pa.string()),
        ("rejected", pa.string()),
        ("text", pa.string()),
        ("group", pa.string()),
        ("source", pa.string()),
        ("line", pa.int64()),
        ("meta", pa.string()),
    ]
)
"""The schema of records, one a row.

- ``id``: hash of the whole normalised content; ``input_id``: of the prompt or text alone; both with the name of the
  image, where ``meta`` has one as ``image``.
- ``prompt``: the turns before the answer; null for plain text.
- ``completion``: the answer, the better one of a preference pair; null while unlabelled.
- ``rejected``: the worse answer of a preference pair; null otherwise.
- ``text``: plain text; null otherwise.
- ``group``: records that must stay in one split; null for none.
- ``source``, ``line``: the file as named by the user, and the 1-based line (row in Parquet and Arrow).
- ``meta``: JSON object of all other columns of the file.
"""

REJECTED: pa.Schema = pa.schema(
    [
        *RECORD,
        pa.field("step", pa.string()),
        pa.field("reason", pa.string()),
        pa.field("detail", pa.string()),
        pa.field("score", pa.float64()),
        pa.field("cluster", pa.string()),
        pa.field("kept", pa.string()),
    ]
)
"""A record that a step rejected: the step, the reason (a category), the detail (of this record), the number that the
decision rests on, and for a duplicate the ids of its cluster's first record and of the one that is kept."""

CHANGED: pa.Schema = pa.schema(
    [("id", pa.string()), ("before", pa.string()), ("step", pa.string()), ("detail", pa.string())]
)
"""A record that a step changed, or derived from another: its id, the id before or of the other, and the change."""

FACT: pa.Schema = pa.schema(
    [
        ("id", pa.string()),
        ("step", pa.string()),
        ("name", pa.string()),
        ("value", pa.float64()),
        ("text", pa.string()),
    ]
)
"""A measurement of a record, kept or rejected: a number or a string."""


def records(rows: Sequence[Mapping[str, Any]]) -> pa.Table:
    """Builds a RECORD table of ``rows``, each with every column."""
    return pa.Table.from_pylist(list(rows), schema=RECORD)


def concat(tables: Sequence[pa.Table], schema: pa.Schema = RECORD) -> pa.Table:
    """Concatenates tables to contiguous columns; no tables give an empty one."""
    # The empty table makes no tables a table, too, and refuses one of another schema.
    return pa.concat_tables([schema.empty_table(), *tables]).combine_chunks()


def locations(table: pa.Table) -> list[str]:
    """Returns ``file:line`` of every record."""
    return [
        f"{source}:{line}" for source, line in zip(table["source"].to_pylist(), table["line"].to_pylist(), strict=True)
    ]


class TextColumn(NamedTuple):
    """The M texts of one column of a RECORD table, in row order.

    Attributes:
        column: Name of the column.
        texts: large_string [M].
        rows: int64 [M], the row of each text.
    """

    column: str
    texts: pa.Array
    rows: npt.NDArray[np.int64]


def input_texts(table: pa.Table) -> list[str]:
    """Returns one string a record: its text, or its turns one a line, without the system turn."""
    # A system turn is the same in a whole file, and would make all of its inputs look alike.
    return [
        text if prompt is None else "\n".join(turn["content"] for turn in prompt if turn["role"] != "system")
        for prompt, text in zip(table["prompt"].to_pylist(), table["text"].to_pylist(), strict=True)
    ]


def joined_texts(table: pa.Table, field: TextField = "all") -> list[str]:
    """Returns one string a record, its texts one a line; ``""`` where there are none."""
    inputs = input_texts(table) if field != "answer" else [None] * table.num_rows
    better, worse = (
        table[name].to_pylist() if field != "input" else [None] * table.num_rows for name in ("completion", "rejected")
    )
    return ["\n".join(part for part in parts if part is not None) for parts in zip(inputs, better, worse, strict=True)]


def text_columns(table: pa.Table, field: TextField = "all") -> Iterator[TextColumn]:
    """Yields all texts of a RECORD table but nulls: all turns (system turns too), answers and plain texts."""
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
    """Returns the texts of one record.

    Args:
        system: True if system turns are included.
    """
    texts: list[str] = []
    for name in _columns(field):
        if name == "prompt":
            turns = record["prompt"] or []
            texts += [turn["content"] for turn in turns if system or turn["role"] != "system"]
        elif record[name] is not None:
            texts.append(record[name])
    return texts


def map_texts(
    record: Mapping[str, Any], function: Callable[[str], str], field: TextField = "all", system: bool = True
) -> dict[str, Any]:
    """Applies a function to the texts of a record, and returns the columns that change.

    Args:
        system: True if system turns are mapped too.
    """
    changed: dict[str, Any] = {}
    for name in _columns(field):
        value = record[name]
        if value is None:
            continue
        if name == "prompt":
            new: Any = [
                {**turn, "content": function(turn["content"])} if system or turn["role"] != "system" else turn
                for turn in value
            ]
        else:
            new = function(value)
        if new != value:
            changed[name] = new
    return changed


def first_empty(values: Mapping[str, Any]) -> str | None:
    """Returns the name of the first column that holds an empty text, such as one that `map_texts` returns."""
    for name, value in values.items():
        texts = [turn["content"] for turn in value] if name == "prompt" else [value]
        if "" in texts:
            return name
    return None


def _columns(field: TextField) -> tuple[str, ...]:
    inputs, answers = ("prompt", "text"), ("completion", "rejected")
    return {"input": inputs, "answer": answers, "all": inputs + answers}[field]
