"""What decides where a record goes, small and made record by record."""

import json

import pyarrow as pa
import pyarrow.compute as compute

from posttrain.data.records.made import made_of
from posttrain.data.split.config import SplitsConfig
from posttrain.data.split.moments import moment
from posttrain.store.errors import UserError

KEYS: pa.Schema = pa.schema(
    [
        ("input_id", pa.string()),
        ("group", pa.string()),
        ("stratum", pa.string()),
        ("time", pa.timestamp("us", "UTC")),
        ("source", pa.string()),
        ("line", pa.int64()),
        ("origin", pa.string()),
        ("made", pa.bool_()),
    ]
)
"""One row a record. ``stratum`` is its label or source and ``time`` its moment, each null unless the config asks.
``made``: whether it was made of others, as `posttrain.data.records.made` reads it; ``origin`` is the id of the one
that it was
made of, its own for all others."""


def keys(table: pa.Table, config: SplitsConfig) -> pa.Table:
    """KEYS table of a RECORD table; of a large set it can be made table by table.

    Raises:
        UserError: ``by: time``, and a record has no moment, or none that can be read.
    """
    nothing = pa.nulls(table.num_rows, pa.string())
    stratum = {None: nothing, "label": table["completion"], "source": table["source"]}[config.stratify]
    times = _times(table, config.time) if config.time is not None else pa.nulls(table.num_rows, KEYS.field("time").type)
    group = table["group"] if config.group else nothing
    of = made_of(table)
    origin = compute.if_else(compute.equal(of, "").fill_null(True), table["id"], of)
    columns = [table["input_id"], group, stratum, times, table["source"], table["line"], origin, of.is_valid()]
    return pa.table(columns, schema=KEYS)


def _times(table: pa.Table, column: str) -> pa.Array:
    found: list[int | None] = []
    made = made_of(table).is_valid().to_pylist()
    columns = (table[name].to_pylist() for name in ("meta", "source", "line"))
    for meta, source, line, is_made in zip(*columns, made, strict=True):
        value = json.loads(meta).get(column)
        if value is None and is_made:  # its moment decides nothing
            found.append(None)
            continue
        if value is None:
            raise UserError(f"has no `{column}`, which decides its split", where=f"{source}:{line}")
        try:
            found.append(moment(value))
        except ValueError as error:
            raise UserError(f"`{column}`: {error}", where=f"{source}:{line}") from None
    return pa.array(found, KEYS.field("time").type)
