"""Records whose content a step changes: new values, new identities, and a note of what they were."""

from collections.abc import Mapping
from typing import Any

import pyarrow as pa

from posttrain.data.records.normalise import identify
from posttrain.data.records.schema import CHANGED, RECORD


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
    new = identify(pa.Table.from_pylist(given, schema=RECORD))
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
