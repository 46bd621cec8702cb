"""What a data step returns: kept, rejected and changed records, and how to build these tables."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from posttrain.data.records.identity import assign_ids
from posttrain.data.records.schema import CHANGED, RECORD, REJECTED


@dataclass(frozen=True)
class Rejection:
    """Why a record goes.

    Attributes:
        reason: one of few; it is counted.
        detail: tells of this record.
        score: what the decision rests on, where it is a number: a similarity, a share, a perplexity.
        cluster: id of the first record of its cluster, for a duplicate.
        kept: id of the record that stayed in its place, for a duplicate.
    """

    reason: str
    detail: str
    score: float | None = None
    cluster: str | None = None
    kept: str | None = None


class Outcome(NamedTuple):
    """What a step made of a RECORD table of N rows; all tables are in the order of that table.

    Attributes:
        kept: RECORD table; rows that the step added follow the row that they were made from.
        rejected: REJECTED table.
        changed: CHANGED table of the kept rows whose content is not what it was, and of those that were added.
        facts: what was measured, by name: N values each, float64 or string, null where there is nothing to say.
    """

    kept: pa.Table
    rejected: pa.Table
    changed: pa.Table = pa.Table.from_batches([], CHANGED)
    facts: Mapping[str, pa.Array] = {}


def reject_rows(
    table: pa.Table, step: str, rejections: Mapping[int, Rejection], facts: Mapping[str, pa.Array] | None = None
) -> Outcome:
    """``table`` without the rows in ``rejections``, and those rows with the reasons; both in table order."""
    rows = sorted(rejections)
    keep = np.ones(table.num_rows, dtype=bool)
    keep[rows] = False
    gone = table.take(pa.array(rows, pa.int64()))
    why = [rejections[row] for row in rows]
    columns = [
        pa.array([step] * len(rows), pa.string()),
        pa.array([one.reason for one in why], pa.string()),
        pa.array([one.detail for one in why], pa.string()),
        pa.array([one.score for one in why], pa.float64()),
        pa.array([one.cluster for one in why], pa.string()),
        pa.array([one.kept for one in why], pa.string()),
    ]
    rejected = pa.table([*gone.columns, *columns], schema=REJECTED)
    return Outcome(table.filter(pa.array(keep)), rejected, facts=facts or {})


def locations(table: pa.Table) -> list[str]:
    """``file:line`` of every record."""
    return [
        f"{source}:{line}" for source, line in zip(table["source"].to_pylist(), table["line"].to_pylist(), strict=True)
    ]


def rewrite(
    table: pa.Table, values: Mapping[int, Mapping[str, Any]], step: str, details: Mapping[int, str] | None = None
) -> tuple[pa.Table, pa.Table]:
    """``table`` with some columns of some rows replaced, and the CHANGED table of those whose id is another now.

    Args:
        table: RECORD table.
        values: by row the columns that are to hold something else, such as ``{"text": ...}``.
        details: by row what was done, in words.
    """
    rows = sorted(values)
    places = pa.array(rows, pa.int64())
    old = table.take(places)
    given = [{**record, **values[row]} for row, record in zip(rows, old.to_pylist(), strict=True)]
    new = assign_ids(pa.Table.from_pylist(given, schema=RECORD))
    pick = list(range(table.num_rows))
    for position, row in enumerate(rows):
        pick[row] = table.num_rows + position
    changed = [
        {"id": now, "before": before, "step": step, "detail": (details or {}).get(row, "")}
        for row, now, before in zip(rows, new["id"].to_pylist(), old["id"].to_pylist(), strict=True)
        if now != before
    ]
    return (
        pa.concat_tables([table, new]).take(pa.array(pick, pa.int64())),
        pa.Table.from_pylist(changed, schema=CHANGED),
    )
