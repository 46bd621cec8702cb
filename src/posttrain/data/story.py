"""What became of one record in a dataset version, from the file to its side or its rejection."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as compute
import pyarrow.parquet as parquet

from posttrain.data.construction import GONE
from posttrain.data.shard import CHANGES, FACTS, RECORDS, REJECTIONS, Shard
from posttrain.data.stored_version import GONE_FILE, OUT, Version
from posttrain.store.errors import UserError


@dataclass(frozen=True)
class Story:
    """Attributes:
    record: the record as it was last seen, with all RECORD columns.
    events: in order, each with ``step`` and ``what``, and what else is known of it.
    split: the side that it is on; None for one that is not in the version.
    """

    record: dict[str, Any]
    events: list[dict[str, Any]]
    split: str | None


def stories(version: Version, text: str) -> list[Story]:
    """The stories of the records whose id, or whose id before or after a change, begins with ``text``.

    Equal records of several places have one id and a story each.

    Raises:
        UserError: several ids begin so.
    """
    if version.whole:
        return list(_of_whole(version, text))
    ids = _family(version, text)
    if not ids:
        return []
    gone = parquet.read_table(version.folder / GONE_FILE, schema=GONE)
    found = [
        one for number, shards in enumerate(version.phases) for one in _in_phase(version, number, shards, ids, gone)
    ]
    return sorted(found, key=lambda story: (story.split is None, story.record["line"]))


def _family(version: Version, text: str) -> list[str]:
    """The id that begins with ``text`` and those that it had before or after a step changed the record."""
    pairs = [(row["id"], row["before"]) for table in version.changed() for row in _near(table, text)]
    ids = {id for pair in pairs for id in pair if id.startswith(text)}
    for shards in version.phases:
        for shard in shards:
            for file in (RECORDS, REJECTIONS):
                column = parquet.read_table(shard.folder / file, columns=["id"])["id"]
                ids.update(column.filter(compute.starts_with(column, text)).to_pylist())
    if len(ids) > 1:
        raise UserError(f"`{text}` could be {len(ids)} records", fix="give more of the id")
    return sorted(ids | {id for pair in pairs for id in pair}) if ids else []


def _near(table: pa.Table, text: str) -> list[dict[str, Any]]:
    hit = compute.or_(compute.starts_with(table["id"], text), compute.starts_with(table["before"], text))
    rows: list[dict[str, Any]] = table.filter(hit).to_pylist()
    return rows


def _in_phase(version: Version, number: int, shards: list[Shard], ids: list[str], gone: pa.Table) -> Iterator[Story]:
    """Records that left in a phase, or in the last one also those that stayed."""
    last = number == len(version.phases) - 1
    wanted = pa.array(ids, pa.string())
    start = 0
    for shard in shards:
        known = _told(shard, ids)
        rejected = parquet.read_table(shard.folder / REJECTIONS)
        for row in rejected.filter(compute.is_in(rejected["id"], value_set=wanted)).to_pylist():
            yield Story(row, [*_origin(row), *known, _rejection(row)], None)
        column = parquet.read_table(shard.folder / RECORDS, columns=["id"])["id"]
        rows = np.flatnonzero(compute.is_in(column, value_set=wanted).to_numpy(zero_copy_only=False))
        for record, row in zip(shard.records().take(pa.array(rows)).to_pylist(), rows.tolist(), strict=True):
            here = compute.and_(compute.equal(gone["phase"], number), compute.equal(gone["row"], start + row))
            why = gone.filter(here).to_pylist()
            events = [*_origin(record), *known]
            if why:
                yield Story(record, [*events, _rejection(why[0])], None)
            elif last and version.sides[start + row] != OUT:
                split = version.splits[version.sides[start + row]]
                others = _stood_for(gone, record["id"])
                yield Story(record, [*events, *others, {"step": "kept", "what": f"kept in `{split}`"}], split)
        start += shard.rows


def _told(shard: Shard, ids: list[str]) -> list[dict[str, Any]]:
    """What steps changed and measured of the records with these ids."""
    wanted = pa.array(ids, pa.string())
    changed, facts = parquet.read_table(shard.folder / CHANGES), parquet.read_table(shard.folder / FACTS)
    events = []
    for row in changed.filter(compute.is_in(changed["id"], value_set=wanted)).to_pylist():
        detail = f": {row['detail']}" if row["detail"] else ""
        events.append({"step": row["step"], "what": f"made of {row['before']}{detail}", "before": row["before"]})
    for row in facts.filter(compute.is_in(facts["id"], value_set=wanted)).to_pylist():
        value = row["text"] if row["value"] is None else row["value"]
        shown = f"{value:.4g}" if isinstance(value, float) else value
        events.append({"step": row["step"], "what": f"{row['name']} {shown}", "value": value})
    return [event for place, event in enumerate(events) if event not in events[:place]]  # equal records share an id


def _origin(record: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"step": "read", "what": f"read from {record['source']}:{record['line']}"}]


def _rejection(row: dict[str, Any]) -> dict[str, Any]:
    told = {name: row[name] for name in ("reason", "detail", "score", "cluster", "kept") if row[name] is not None}
    return {"step": row["step"], "what": f"rejected: {row['reason']}: {row['detail']}", **told}


def _stood_for(gone: pa.Table, id: str) -> list[dict[str, Any]]:
    """The duplicates in whose place a record stayed, counted by step."""
    events = []
    mine = gone.filter(compute.and_(compute.equal(gone["kept"], id), compute.not_equal(gone["step"], "decontaminate")))
    for step in dict.fromkeys(mine["step"].to_pylist()):
        count = mine["step"].to_pylist().count(step)
        records = "1 other record" if count == 1 else f"{count} other records"
        events.append({"step": step, "what": f"stayed in the place of {records}", "count": count})
    return events


def _of_whole(version: Version, text: str) -> Iterator[Story]:
    for table in version.rejected():
        for row in table.filter(compute.starts_with(table["id"], text)).to_pylist():
            yield Story(row, [*_origin(row), _rejection(row)], None)
    for table in version.tables():
        for row in table.filter(compute.starts_with(table["id"], text)).to_pylist():
            name = version.meta.get("name", "train")
            yield Story(row, [*_origin(row), {"step": "kept", "what": f"kept in `{name}`"}], name)
