"""Browses the records of a dataset version: by split, or those that were rejected, with a search in their texts."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as compute

from posttrain.data.versions.version import Version
from posttrain.store.errors import UserError

REJECTED = "rejected"
"""Stands for the rejected records in place of a split."""

_COLUMNS = ["id", "prompt", "completion", "rejected", "text", "source", "line", "meta"]
_SEARCHED = ("id", "completion", "rejected", "text", "source", "reason", "detail")


@dataclass(frozen=True)
class RecordPage:
    """A page of records.

    Attributes:
        rows: Rows as dicts with at least ``id, prompt, completion, rejected, text, source, line, meta``; rejected
            records also have ``step, reason, detail``.
        total: Number of all records that match.
        start: Number of records before this page.
    """

    rows: list[dict[str, Any]]
    total: int
    start: int


def search_records(
    version: Version, query: str = "", split: str | None = None, *, start: int = 0, count: int = 50
) -> RecordPage:
    """Returns the records whose texts, answer, file or id contain a text, in reading order.

    Args:
        version: The version.
        query: Text to find, whatever its letter case; "" for all records.
        split: A split of the version, `REJECTED`, or None for all that are kept.
        start: Number of matches to leave out.
        count: Most rows of the page.

    Raises:
        UserError: there is no such split.
    """
    if split not in (None, REJECTED, *version.splits):
        raise UserError(f"the version has no split `{split}`", fix=f"one of {', '.join(version.splits)}")
    rows: list[dict[str, Any]] = []
    total = 0
    for table in _tables(version, split):
        matches = table.filter(_matches(table, query)) if query else table
        if (wanted := count - len(rows)) > 0 and total + matches.num_rows > start:
            rows += matches.slice(max(start - total, 0), wanted).to_pylist()
        total += matches.num_rows
    return RecordPage(rows, total, start)


def _tables(version: Version, split: str | None) -> Iterator[pa.Table]:
    if split == REJECTED:
        yield from version.rejected()
    else:
        yield from version.tables(split, _COLUMNS)


def _matches(table: pa.Table, query: str) -> pa.Array:
    """Returns bool [N]: which rows contain the query in a column or in a turn of their prompt."""
    matches = np.zeros(table.num_rows, bool)
    for name in _SEARCHED:
        if name in table.column_names:
            contained = compute.match_substring(table[name], query, ignore_case=True)
            matches |= compute.fill_null(contained, False).to_numpy()
    start = 0
    for chunk in table["prompt"].chunks:
        content = compute.struct_field(compute.list_flatten(chunk), "content")
        contained = compute.fill_null(compute.match_substring(content, query, ignore_case=True), False)
        rows = compute.list_parent_indices(chunk).to_numpy()
        matches[start + np.unique(rows[contained.to_numpy(zero_copy_only=False)])] = True
        start += len(chunk)
    return pa.array(matches)
