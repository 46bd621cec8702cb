"""The result of a data step: kept, rejected and changed records, and functions that build these tables."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from posttrain.data.records.record import CHANGED, RECORD, REJECTED, assign_ids


@dataclass(frozen=True)
class Rejection:
    """The reason why a step rejects a record.

    Attributes:
        reason: A category, by which rejections are counted.
        detail: The particulars of this record.
        score: The number that the decision rests on, if any: a similarity, a share, a perplexity.
        cluster: Id of the first record of its cluster, for a duplicate.
        kept: Id of the record that is kept in its place, for a duplicate.
    """

    reason: str
    detail: str
    score: float | None = None
    cluster: str | None = None
    kept: str | None = None


class Outcome(NamedTuple):
    """The result of applying a step to a RECORD table of N rows; all tables keep the order of that table.

    Attributes:
        kept: RECORD table; rows that the step adds follow the row that they derive from.
        rejected: REJECTED table.
        changed: CHANGED table of the kept rows with another content than before, and of the added rows.
        facts: Measurements by name: N values each, float64 or string, null where nothing was measured.
    """

    kept: pa.Table
    rejected: pa.Table
    changed: pa.Table = pa.Table.from_batches([], CHANGED)
    facts: Mapping[str, pa.Array] = {}


def reject_rows(
    table: pa.Table, step: str, rejections: Mapping[int, Rejection], facts: Mapping[str, pa.Array] | None = None
) -> Outcome:
    """Splits a table into kept rows and the rows in ``rejections``, with their reasons, both in table order."""
    rows = sorted(rejections)
    # A mask keeps the order of the table, whatever order the rejections come in.
    keep = np.ones(table.num_rows, dtype=bool)
    keep[rows] = False
    records = table.take(pa.array(rows, pa.int64()))
    ordered = [rejections[row] for row in rows]
    columns = [
        pa.array([step] * len(rows), pa.string()),
        pa.array([rejection.reason for rejection in ordered], pa.string()),
        pa.array([rejection.detail for rejection in ordered], pa.string()),
        pa.array([rejection.score for rejection in ordered], pa.float64()),
        pa.array([rejection.cluster for rejection in ordered], pa.string()),
        pa.array([rejection.kept for rejection in ordered], pa.string()),
    ]
    rejected = pa.table([*records.columns, *columns], schema=REJECTED)
    return Outcome(table.filter(pa.array(keep)), rejected, facts=facts or {})


def rewrite(
    table: pa.Table, values: Mapping[int, Mapping[str, Any]], step: str, details: Mapping[int, str] | None = None
) -> tuple[pa.Table, pa.Table]:
    """Replaces values of some rows, and returns the table with the CHANGED table of those whose id changes.

    Args:
        table: RECORD table.
        values: Columns to replace by row, such as ``{"text": ...}``.
        details: Description of the change by row.
    """
    rows = sorted(values)
    indices = pa.array(rows, pa.int64())
    old = table.take(indices)
    rewritten = [{**record, **values[row]} for row, record in zip(rows, old.to_pylist(), strict=True)]
    new = assign_ids(pa.Table.from_pylist(rewritten, schema=RECORD))
    # One take over the old and the new rows: Arrow tables cannot be assigned to.
    pick = list(range(table.num_rows))
    for position, row in enumerate(rows):
        pick[row] = table.num_rows + position
    changed = [
        {"id": now, "before": before, "step": step, "detail": (details or {}).get(row, "")}
        for row, now, before in zip(rows, new["id"].to_pylist(), old["id"].to_pylist(), strict=True)
        if now != before  # a change of whitespace alone leaves the id as it is
    ]
    return (
        pa.concat_tables([table, new]).take(pa.array(pick, pa.int64())),
        pa.Table.from_pylist(changed, schema=CHANGED),
    )
