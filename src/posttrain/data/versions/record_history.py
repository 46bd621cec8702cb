"""The history of one record in a dataset version, from the file to its split or its rejection."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as compute
import pyarrow.parquet as parquet

from posttrain.data.records.provenance import origin_events
from posttrain.data.records.schema import FACT
from posttrain.data.versions.pipeline import DROPPED
from posttrain.data.versions.shards import FACTS, RECORDS, REJECTIONS, Shard
from posttrain.data.versions.version import DROPPED_FILE, EXCLUDED, FACTS_FILE, Version
from posttrain.store.errors import UserError


@dataclass(frozen=True)
class RecordHistory:
    """Attributes:
    record: the record as it was last seen, with all RECORD columns.
    events: in order, each with ``step`` and ``what``, and what else is known of it.
    split: the side that it is on; None for one that is not in the version.
    """

    record: dict[str, Any]
    events: list[dict[str, Any]]
    split: str | None


def record_histories(version: Version, text: str) -> list[RecordHistory]:
    """The stories of the records whose id, or whose id before or after a change, begins with ``text``.

    Equal records of several places have one id and a story each.

    Raises:
        UserError: several ids begin so.
    """
    if version.whole:
        return list(_small_version_histories(version, text))
    made_of = _changes(version)
    id = _full_id(version, text, made_of)
    if id is None:
        return []
    ids = {one for one in {id, *made_of, *(before for before, _ in made_of.values())} if id in _ancestors(one, made_of)}
    gone = parquet.read_table(version.folder / DROPPED_FILE, schema=DROPPED)
    forms = ids | set(_ancestors(id, made_of))
    facts = [_facts_of(shard, forms) for shards in version.phases for shard in shards]
    told = pa.concat_tables([*facts, _with_ids(parquet.read_table(version.folder / FACTS_FILE), forms)])
    found = []
    for number, shards in enumerate(version.phases):
        for record, why, side in _appearances(version, number, shards, ids, gone):
            events = [*_origin(record, made_of), *_events(record["id"], made_of, told)]
            if why is not None:
                found.append(RecordHistory(record, [*events, _rejection(why)], None))
            elif side is not None:
                split = version.splits[side]
                others = _duplicates_replaced(gone, record["id"])
                found.append(
                    RecordHistory(record, [*events, *others, {"step": "kept", "what": f"kept in `{split}`"}], split)
                )
    return sorted(found, key=lambda story: (story.split is None, story.record["line"]))


Changes = Mapping[str, tuple[str, dict[str, Any]]]
"""By id what the record was before, and the row of CHANGED that tells of it."""


def _changes(version: Version) -> Changes:
    rows = [row for table in version.changed() for row in table.to_pylist() if row["id"] != row["before"]]
    return {row["id"]: (row["before"], row) for row in rows}


def _ancestors(id: str, made_of: Changes) -> list[str]:
    """The id and those that it had before, the last one first."""
    found = [id]
    while found[-1] in made_of and made_of[found[-1]][0] not in found:
        found.append(made_of[found[-1]][0])
    return found


def _full_id(version: Version, text: str, made_of: Changes) -> str | None:
    """The one id that begins with ``text``."""
    ids = {id for id in {*made_of, *(before for before, _ in made_of.values())} if id.startswith(text)}
    for shards in version.phases:
        for shard in shards:
            for file in (RECORDS, REJECTIONS):
                column = parquet.read_table(shard.folder / file, columns=["id"])["id"]
                ids.update(column.filter(compute.starts_with(column, text)).to_pylist())
    if len(ids) > 1:
        raise UserError(f"`{text}` could be {len(ids)} records", fix="give more of the id")
    return ids.pop() if ids else None


def _with_ids(table: pa.Table, ids: set[str]) -> pa.Table:
    return table.filter(compute.is_in(table["id"], value_set=pa.array(sorted(ids), pa.string())))


def _facts_of(shard: Shard, ids: set[str]) -> pa.Table:
    return _with_ids(parquet.read_table(shard.folder / FACTS, schema=FACT), ids)


Appearance = tuple[dict[str, Any], dict[str, Any] | None, int | None]
"""A record, why it was rejected (None: it was not), and its side (None: it went on to the next phase)."""


def _appearances(
    version: Version, number: int, shards: list[Shard], ids: set[str], gone: pa.Table
) -> Iterator[Appearance]:
    last = number == len(version.phases) - 1
    wanted = pa.array(sorted(ids), pa.string())
    start = 0
    for shard in shards:
        for row in _with_ids(parquet.read_table(shard.folder / REJECTIONS), ids).to_pylist():
            yield row, row, None
        column = parquet.read_table(shard.folder / RECORDS, columns=["id"])["id"]
        rows = np.flatnonzero(compute.is_in(column, value_set=wanted).to_numpy(zero_copy_only=False))
        for record, row in zip(shard.records().take(pa.array(rows)).to_pylist(), rows.tolist(), strict=True):
            here = compute.and_(compute.equal(gone["phase"], number), compute.equal(gone["row"], start + row))
            why = gone.filter(here).to_pylist()
            side = int(version.sides[start + row]) if last and version.sides[start + row] != EXCLUDED else None
            yield record, (why[0] if why else None), side
        start += shard.rows


def _events(id: str, made_of: Changes, facts: pa.Table) -> list[dict[str, Any]]:
    """What steps changed and measured of a record, from its first form to its last."""
    events: list[dict[str, Any]] = []
    for one in reversed(_ancestors(id, made_of)):
        if one in made_of:
            before, row = made_of[one]
            detail = f": {row['detail']}" if row["detail"] else ""
            events.append({"step": row["step"], "what": f"made of {before}{detail}", "before": before})
        for row in facts.filter(compute.equal(facts["id"], one)).to_pylist():
            value = row["text"] if row["value"] is None else row["value"]
            shown = f"{value:.4g}" if isinstance(value, float) else value
            events.append({"step": row["step"], "what": f"{row['name']} {shown}", "value": value})
    return [event for place, event in enumerate(events) if event not in events[:place]]  # equal records share an id


def _origin(record: dict[str, Any], made_of: Changes) -> list[dict[str, Any]]:
    """Where a record was read, and before that how it was made; what a step of this version made tells so itself."""
    here = {made_of[one][1]["step"] for one in _ancestors(record["id"], made_of) if one in made_of}
    made = [event for event in origin_events(record["meta"]) if event["step"] not in here]
    return [*made, {"step": "read", "what": f"read from {record['source']}:{record['line']}"}]


def _rejection(row: dict[str, Any]) -> dict[str, Any]:
    told = {name: row[name] for name in ("reason", "detail", "score", "cluster", "kept") if row[name] is not None}
    return {"step": row["step"], "what": f"rejected: {row['reason']}: {row['detail']}", **told}


def _duplicates_replaced(gone: pa.Table, id: str) -> list[dict[str, Any]]:
    """The duplicates in whose place a record stayed, counted by step."""
    events = []
    mine = gone.filter(compute.and_(compute.equal(gone["kept"], id), compute.not_equal(gone["step"], "decontaminate")))
    for step in dict.fromkeys(mine["step"].to_pylist()):
        count = mine["step"].to_pylist().count(step)
        records = "1 other record" if count == 1 else f"{count} other records"
        events.append({"step": step, "what": f"stayed in the place of {records}", "count": count})
    return events


def _small_version_histories(version: Version, text: str) -> Iterator[RecordHistory]:
    for table in version.rejected():
        for row in table.filter(compute.starts_with(table["id"], text)).to_pylist():
            yield RecordHistory(row, [*_origin(row, {}), _rejection(row)], None)
    for table in version.tables():
        for row in table.filter(compute.starts_with(table["id"], text)).to_pylist():
            name = version.meta.get("name", "train")
            yield RecordHistory(row, [*_origin(row, {}), {"step": "kept", "what": f"kept in `{name}`"}], name)
