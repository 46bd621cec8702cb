"""Compares two dataset versions."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute

from posttrain.data.records.schema import REJECTED, concat
from posttrain.data.versions.version import Version


@dataclass(frozen=True)
class Diff:
    """Holds what changed between two versions.

    Attributes:
        came: RECORD table of the records that only the newer version holds.
        went: REJECTED table of those that only the older one holds, with the newer one's reason, if any.
        changed: inputs that both hold once with different answers: ``input_id, before, after, source, line``.
    """

    came: pa.Table
    went: pa.Table
    changed: pa.Table


ANSWER_CHANGES = pa.schema(
    [
        ("input_id", pa.string()),
        ("before", pa.string()),
        ("after", pa.string()),
        ("source", pa.string()),
        ("line", pa.int64()),
    ]
)


def diff_versions(older: Version, newer: Version) -> Diff:
    """Finds the records added, removed (and why), and answered differently from ``older`` to ``newer``."""
    came = _records_without(newer, _all_ids(older))
    went = _records_without(older, _all_ids(newer))
    arrived, left = _single_inputs(came), _single_inputs(went)
    # Only inputs that occur once on both sides can be paired: of several answers none is the changed one.
    both = {
        identity
        for identity in left
        if identity in arrived and _unanswered_content(left[identity]) == _unanswered_content(arrived[identity])
    }
    changed = [
        {
            "input_id": identity,
            "before": left[identity]["completion"],
            "after": arrived[identity]["completion"],
            "source": arrived[identity]["source"],
            "line": arrived[identity]["line"],
        }
        for identity in left
        if identity in both
    ]
    known = pa.array(sorted(both), pa.string())
    return Diff(
        _filter_out(came, "input_id", known),
        _with_reasons(_filter_out(went, "input_id", known), newer),
        pa.Table.from_pylist(changed, schema=ANSWER_CHANGES),
    )


def _all_ids(version: Version) -> pa.Array:
    return pa.concat_arrays(
        [pa.array([], pa.string()), *(table["id"].combine_chunks() for table in version.tables(columns=["id"]))]
    )


def _records_without(version: Version, known: pa.Array) -> pa.Table:
    return concat([_filter_out(table, "id", known) for table in version.tables()])


def _filter_out(table: pa.Table, column: str, known: pa.Array) -> pa.Table:
    """Drops the rows whose value in ``column`` is among the known."""
    return table.filter(pa.compute.invert(pa.compute.is_in(table[column], value_set=known)))


def _unanswered_content(record: Mapping[str, Any]) -> Any:
    return record["text"], record["rejected"]


def _single_inputs(table: pa.Table) -> dict[str, dict[str, Any]]:
    """Records by input, of the inputs that occur once in ``table``."""
    rows = table.to_pylist()
    counts: dict[str, int] = {}
    for row in rows:
        counts[row["input_id"]] = counts.get(row["input_id"], 0) + 1
    return {row["input_id"]: row for row in rows if counts[row["input_id"]] == 1}


def _with_reasons(went: pa.Table, newer: Version) -> pa.Table:
    ids = went["id"].combine_chunks()
    # Only rows of removed records are kept, as a version may have rejected millions.
    tables = [table.filter(pa.compute.is_in(table["id"], value_set=ids)) for table in newer.rejected()]
    reasons = {row["id"]: row for row in concat(tables, REJECTED).to_pylist()}
    unknown = {**dict.fromkeys(REJECTED.names), "step": "", "reason": "not in the newer version", "detail": ""}
    rows = [{**reasons.get(row["id"], unknown), **row} for row in went.to_pylist()]
    return pa.Table.from_pylist(rows, schema=REJECTED)
