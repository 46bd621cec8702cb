"""The Arrow schemas of records, and of the tables that steps write about them."""

from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa

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
    """Build a RECORD table of ``rows``, each with every column."""
    return pa.Table.from_pylist(list(rows), schema=RECORD)


def concat(tables: Sequence[pa.Table], schema: pa.Schema = RECORD) -> pa.Table:
    """Concatenate tables to contiguous columns; no tables give an empty one."""
    return pa.concat_tables([schema.empty_table(), *tables]).combine_chunks()
