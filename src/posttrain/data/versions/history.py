"""Reports the history of one record in a dataset version, and the changes and increments between versions."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as compute
import pyarrow.parquet as parquet

from posttrain.data.records.provenance import RECORD_KINDS, origin_events, record_kinds
from posttrain.data.records.record import FACT, REJECTED, concat
from posttrain.data.versions.pipeline import DROPPED
from posttrain.data.versions.shards import FACTS, RECORDS, REJECTIONS, Shard
from posttrain.data.versions.version import DROPPED_FILE, EXCLUDED, FACTS_FILE, Version
from posttrain.store.errors import UserError


@dataclass(frozen=True)
class RecordHistory:
    """Holds a record and everything that happened to it.

    Attributes:
        record: The record as it was last seen, with all RECORD columns.
        events: Events in order, each with ``step`` and ``what``, and further details.
        split: Name of its split; None if it is not in the version.
    """

    record: dict[str, Any]
    events: list[dict[str, Any]]
    split: str | None


def record_histories(version: Version, text: str) -> list[RecordHistory]:
    """Finds the histories of the records whose id, or whose id before or after a change, begins with ``text``.

    Equal records from several places share one id and have a history each.

    Raises:
        UserError: several ids begin so.
    """
    if version.whole:
        return list(_small_version_histories(version, text))
    origins = _changes(version)
    id = _full_id(version, text, origins)
    if id is None:
        return []
    # A record may have had several ids, one after each rewriting step.
    ids = {
        candidate
        for candidate in {id, *origins, *(before for before, _ in origins.values())}
        if id in _ancestors(candidate, origins)
    }
    dropped = parquet.read_table(version.folder / DROPPED_FILE, schema=DROPPED)
    forms = ids | set(_ancestors(id, origins))
    tables = [_facts_of(shard, forms) for shards in version.phases for shard in shards]
    facts = pa.concat_tables([*tables, _with_ids(parquet.read_table(version.folder / FACTS_FILE), forms)])
    histories = []
    for number, shards in enumerate(version.phases):
        for record, why, split_index in _appearances(version, number, shards, ids, dropped):
            events = [*_origin(record, origins), *_events(record["id"], origins, facts)]
            if why is not None:
                histories.append(RecordHistory(record, [*events, _rejection(why)], None))
            elif split_index is not None:
                split = version.splits[split_index]
                replacements = _duplicates_replaced(dropped, record["id"])
                histories.append(
                    RecordHistory(
                        record, [*events, *replacements, {"step": "kept", "what": f"kept in `{split}`"}], split
                    )
                )
    return sorted(histories, key=lambda history: (history.split is None, history.record["line"]))


Changes = Mapping[str, tuple[str, dict[str, Any]]]
"""By id the id before the last change, and the row of CHANGED that records it."""


def _changes(version: Version) -> Changes:
    rows = [row for table in version.changed() for row in table.to_pylist() if row["id"] != row["before"]]
    return {row["id"]: (row["before"], row) for row in rows}


def _ancestors(id: str, origins: Changes) -> list[str]:
    """Lists the id and those that the record had before, the latest first."""
    ids = [id]
    # Two steps that undo each other make a circle of ids, so an id ends the walk when it returns.
    while ids[-1] in origins and origins[ids[-1]][0] not in ids:
        ids.append(origins[ids[-1]][0])
    return ids


def _full_id(version: Version, text: str, origins: Changes) -> str | None:
    """Completes the id that begins with ``text``."""
    ids = {id for id in {*origins, *(before for before, _ in origins.values())} if id.startswith(text)}
    for shards in version.phases:
        for shard in shards:
            for file in (RECORDS, REJECTIONS):
                column = parquet.read_table(shard.folder / file, columns=["id"])["id"]
                ids.update(column.filter(compute.starts_with(column, text)).to_pylist())
    if len(ids) > 1:
        raise UserError(f"`{text}` matches {len(ids)} records", fix="give more of the id")
    return ids.pop() if ids else None


def _with_ids(table: pa.Table, ids: set[str]) -> pa.Table:
    return table.filter(compute.is_in(table["id"], value_set=pa.array(sorted(ids), pa.string())))


def _facts_of(shard: Shard, ids: set[str]) -> pa.Table:
    return _with_ids(parquet.read_table(shard.folder / FACTS, schema=FACT), ids)


Appearance = tuple[dict[str, Any], dict[str, Any] | None, int | None]
"""A record, its rejection (None: it was kept), and its split (None: the next phase continues with it)."""


def _appearances(
    version: Version, phase: int, shards: list[Shard], ids: set[str], dropped: pa.Table
) -> Iterator[Appearance]:
    last = phase == len(version.phases) - 1
    id_set = pa.array(sorted(ids), pa.string())
    start = 0
    for shard in shards:
        for row in _with_ids(parquet.read_table(shard.folder / REJECTIONS), ids).to_pylist():
            yield row, row, None
        column = parquet.read_table(shard.folder / RECORDS, columns=["id"])["id"]
        rows = np.flatnonzero(compute.is_in(column, value_set=id_set).to_numpy(zero_copy_only=False))
        for record, row in zip(shard.records().take(pa.array(rows)).to_pylist(), rows.tolist(), strict=True):
            matches = compute.and_(compute.equal(dropped["phase"], phase), compute.equal(dropped["row"], start + row))
            reasons = dropped.filter(matches).to_pylist()
            split = int(version.row_splits[start + row]) if last else EXCLUDED
            yield record, (reasons[0] if reasons else None), None if split == EXCLUDED else split
        start += shard.rows


def _events(id: str, origins: Changes, facts: pa.Table) -> list[dict[str, Any]]:
    """Lists what steps changed and measured of a record, from its first form to its last."""
    events: list[dict[str, Any]] = []
    for form in reversed(_ancestors(id, origins)):
        if form in origins:
            before, row = origins[form]
            detail = f": {row['detail']}" if row["detail"] else ""
            events.append({"step": row["step"], "what": f"made of {before}{detail}", "before": before})
        for row in facts.filter(compute.equal(facts["id"], form)).to_pylist():
            value = row["text"] if row["value"] is None else row["value"]
            value_text = f"{value:.4g}" if isinstance(value, float) else value
            events.append({"step": row["step"], "what": f"{row['name']} {value_text}", "value": value})
    # Equal records share an id, and with it the events of both.
    return [event for index, event in enumerate(events) if event not in events[:index]]


def _origin(record: dict[str, Any], origins: Changes) -> list[dict[str, Any]]:
    """Reports where a record was read, and before that how it was generated, unless a step of this version did so."""
    steps = {origins[form][1]["step"] for form in _ancestors(record["id"], origins) if form in origins}
    # The change that this version recorded is the same event, with its detail.
    events = [event for event in origin_events(record["meta"]) if event["step"] not in steps]
    return [*events, {"step": "read", "what": f"read from {record['source']}:{record['line']}"}]


def _rejection(row: dict[str, Any]) -> dict[str, Any]:
    details = {name: row[name] for name in ("reason", "detail", "score", "cluster", "kept") if row[name] is not None}
    return {"step": row["step"], "what": f"rejected: {row['reason']}: {row['detail']}", **details}


def _duplicates_replaced(dropped: pa.Table, id: str) -> list[dict[str, Any]]:
    """Counts by step the duplicates that were rejected in favour of a record."""
    events = []
    replaced = dropped.filter(
        compute.and_(compute.equal(dropped["kept"], id), compute.not_equal(dropped["step"], "decontaminate"))
    )
    for step in dict.fromkeys(replaced["step"].to_pylist()):
        count = replaced["step"].to_pylist().count(step)
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


@dataclass(frozen=True)
class Diff:
    """Holds what changed between two versions.

    Attributes:
        added: RECORD table of the records that only the newer version holds.
        removed: REJECTED table of those that only the older one holds, with the newer one's reason, if any.
        changed: Inputs that both hold once with different answers: ``input_id, before, after, source, line``.
    """

    added: pa.Table
    removed: pa.Table
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
    added = _records_without(newer, _all_ids(older))
    removed = _records_without(older, _all_ids(newer))
    new, old = _single_inputs(added), _single_inputs(removed)
    # Only inputs that occur once in both versions can be paired: of several answers none is the changed one.
    paired = {
        identity
        for identity in old
        if identity in new and _unanswered_content(old[identity]) == _unanswered_content(new[identity])
    }
    changed = [
        {
            "input_id": identity,
            "before": old[identity]["completion"],
            "after": new[identity]["completion"],
            "source": new[identity]["source"],
            "line": new[identity]["line"],
        }
        for identity in old
        if identity in paired
    ]
    # A changed answer is reported as such, not as one record removed and one added.
    inputs = pa.array(sorted(paired), pa.string())
    return Diff(
        _filter_out(added, "input_id", inputs),
        _with_reasons(_filter_out(removed, "input_id", inputs), newer),
        pa.Table.from_pylist(changed, schema=ANSWER_CHANGES),
    )


def count_kinds(tables: Iterable[pa.Table]) -> dict[str, int]:
    """Counts the records of tables by kind, without kinds that have none; the tables need the column ``meta``."""
    counts = Counter(kind for table in tables for kind in record_kinds(table["meta"]))
    return {kind: counts[kind] for kind in RECORD_KINDS if counts[kind]}


def increment_kinds(version: Version, parent: Version | None) -> dict[str, int]:
    """Counts by kind the records of a version that its parent does not hold: all without a parent.

    It reads the records' own marks.
    """
    tables = version.tables(columns=["id", "meta"])
    if parent is None:
        return count_kinds(tables)
    ids = _all_ids(parent)
    return count_kinds(_filter_out(table, "id", ids) for table in tables)


def _all_ids(version: Version) -> pa.Array:
    return pa.concat_arrays(
        [pa.array([], pa.string()), *(table["id"].combine_chunks() for table in version.tables(columns=["id"]))]
    )


def _records_without(version: Version, ids: pa.Array) -> pa.Table:
    return concat([_filter_out(table, "id", ids) for table in version.tables()])


def _filter_out(table: pa.Table, column: str, values: pa.Array) -> pa.Table:
    """Drops the rows whose value in ``column`` is one of ``values``."""
    return table.filter(compute.invert(compute.is_in(table[column], value_set=values)))


def _unanswered_content(record: Mapping[str, Any]) -> Any:
    return record["text"], record["rejected"]


def _single_inputs(table: pa.Table) -> dict[str, dict[str, Any]]:
    """Returns the records by input, of the inputs that occur once in ``table``."""
    rows = table.to_pylist()
    counts: dict[str, int] = {}
    for row in rows:
        counts[row["input_id"]] = counts.get(row["input_id"], 0) + 1
    return {row["input_id"]: row for row in rows if counts[row["input_id"]] == 1}


def _with_reasons(removed: pa.Table, newer: Version) -> pa.Table:
    ids = removed["id"].combine_chunks()
    # Only rows of removed records are kept, as a version may have rejected millions.
    tables = [table.filter(compute.is_in(table["id"], value_set=ids)) for table in newer.rejected()]
    reasons = {row["id"]: row for row in concat(tables, REJECTED).to_pylist()}
    unknown = {**dict.fromkeys(REJECTED.names), "step": "", "reason": "not in the newer version", "detail": ""}
    rows = [{**reasons.get(row["id"], unknown), **row} for row in removed.to_pylist()]
    return pa.Table.from_pylist(rows, schema=REJECTED)
