"""Rebuilds a lost or damaged database from the journal and the artifacts' manifests."""

import json
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from sqlalchemy import JSON, Connection, Table, func, insert, select, update

from posttrain.store.artifacts import ArtifactStore
from posttrain.store.config import StoreConfig
from posttrain.store.database import UtcDateTime, sqlite_file, utc_now
from posttrain.store.errors import (
    DamagedArtifactError,
    DamagedDatabaseError,
    EmptyDatabaseError,
    LostDatabaseError,
    UserError,
)
from posttrain.store.files import disk_errors
from posttrain.store.journal import Journal, JournalContent, Rows, read_journal
from posttrain.store.journaled_database import JOURNALED
from posttrain.store.label_tables import label_answers, label_batches, label_items
from posttrain.store.metadata import Metadata
from posttrain.store.tables import artifacts, names, run_inputs, runs
from posttrain.store.tables import journal as position
from posttrain.store.verify import compare_with_manifest, verify_database
from posttrain.store.workers import WORK, exclude_workers
from posttrain.store.workspace import JOURNAL, database_url, describe_work, open_artifacts_of

log = logging.getLogger("posttrain")


@dataclass(frozen=True)
class RebuiltDatabase:
    """The content of a rebuilt database.

    Attributes:
        location: The database.
        rows: Number of rows by table.
        unknown: A line for each thing that neither journal nor manifests know.
        replaced: Where the damaged database file is now; None if there was none.
    """

    location: str
    rows: Mapping[str, int]
    unknown: list[str]
    replaced: Path | None


def rebuild_database(root: Path, config: StoreConfig) -> RebuiltDatabase | None:
    """Rebuilds the workspace's database; returns None, and changes nothing, if it is healthy.

    A damaged SQLite file stays next to the new one under another name.

    Raises:
        UserError: there is nothing to rebuild from, another process works here, or a server's database is damaged but
            not empty.
    """
    home = root.absolute() / ".posttrain"
    if not home.is_dir():
        raise UserError("no workspace here", where=str(root), fix=f"posttrain init {root}")
    with exclude_workers(home):
        url, journal, store = database_url(home, config), Journal(home / JOURNAL), open_artifacts_of(home, config)
        if is_healthy(url, journal, store):
            return None
        if describe_work(journal, store) is None:
            raise UserError("there is neither a journal nor an artifact", where=str(home), fix="restore a backup")
        content = read_journal(journal.path)
        replaced = _set_aside(sqlite_file(url))
        rebuilt = fill_database(url, content, store, replaced)
        if content.damaged or content.missing(content.last):
            # It does not fit the new database, whose next opening begins another.
            _rename(journal.path)
        return rebuilt


def fill_database(
    url: str, content: JournalContent, store: ArtifactStore, replaced: Path | None = None
) -> RebuiltDatabase:
    """Fills an empty database with the rows of a journal and of the artifacts' manifests, in one transaction.

    Args:
        url: SQLAlchemy's URL; missing tables are created.
        content: The journal's content.
        store: The artifacts.
        replaced: Where an earlier database file is now, for the result.

    Raises:
        UserError: the database holds rows, or another process works with it.
    """
    metadata = Metadata(url, create=True)
    try:
        with metadata.advisory_lock(WORK), metadata.transaction() as connection:
            _require_empty(metadata)
            rows, unknown = _known_rows(content, store)
            _insert(connection, rows, store, unknown)
            # At least 1: an empty journal then ends before the database, and gets all rows when it is opened.
            connection.execute(update(position).values(number=max(content.last, 1)))
            return RebuiltDatabase(metadata.location, metadata.count_rows(), unknown, replaced)
    finally:
        metadata.close()


def is_healthy(url: str, journal: Journal, store: ArtifactStore) -> bool:
    """Returns whether the database can be read and its rows are those of the journal and of the manifests."""
    try:
        # Without its journal, as opening both compares them and refuses.
        metadata = Metadata(url)
    except (EmptyDatabaseError, LostDatabaseError, DamagedDatabaseError):
        return False
    try:
        findings = [
            finding for finding in verify_database(metadata, journal) if not finding.where.startswith(str(journal.path))
        ]
        return not findings and not any(compare_with_manifest(store, row) for row in metadata.artifacts())
    finally:
        metadata.close()


def _set_aside(file: Path | None) -> Path | None:
    """Renames an SQLite file with its log; returns its new name, or None if there was none."""
    if file is None:
        return None
    for log_file in (file.with_name(f"{file.name}-{end}") for end in ("wal", "shm")):
        if log_file.exists():
            _rename(log_file)
    return _rename(file) if file.exists() else None


def _rename(path: Path) -> Path:
    number = 1
    while (target := path.with_name(f"{path.name}.damaged-{number}")).exists():
        number += 1
    with disk_errors(path):
        os.replace(path, target)
    return target


def _require_empty(metadata: Metadata) -> None:
    if sum(metadata.count_rows().values()):
        raise rows_error(metadata.location)


def rows_error(location: str) -> UserError:
    """Returns the error for a database that cannot be filled since it holds other rows."""
    fix = "name an empty database in store.database and repeat this"
    return UserError("holds rows, which are never replaced", where=location, fix=fix)


def _known_rows(content: JournalContent, store: ArtifactStore) -> tuple[Rows, list[str]]:
    """Returns the journal's rows, those of artifacts that it does not know, and lines about what is unknown."""
    rows, unknown = content.rows(content.last), []
    for table in JOURNALED:
        rows.setdefault(table.name, {})
    incomplete = sum(_drop_incomplete(table, rows[table.name]) for table in JOURNALED if table is not artifacts)
    if content.damaged:
        unknown.append(f"changes in {len(content.damaged)} damaged lines of the journal")
    if missing := content.missing(content.last):
        unknown.append(f"changes {missing[0]} to {missing[-1]}, which are not in the journal")
    if incomplete:
        unknown.append(f"{incomplete} rows of which only later changes are known")
    if not content.entries:
        unknown.append("rounds, runs, names and deployments, as there is no journal: a run starts at round 0")
    if unknown:
        for id in store.ids():
            rows[artifacts.name].setdefault((id,), {"id": id, "created_at": utc_now().isoformat()})
    _drop_dangling(rows, unknown)
    return rows, unknown


def _drop_incomplete(table: Table, rows: dict[tuple[Any, ...], dict[str, Any]]) -> int:
    """Removes rows whose beginning is unknown; returns how many."""
    required = [column.name for column in table.columns if not column.nullable]
    incomplete = [key for key, row in rows.items() if any(row.get(name) is None for name in required)]
    for key in incomplete:
        del rows[key]
    return len(incomplete)


def _drop_dangling(rows: Rows, unknown: list[str]) -> None:
    """Removes references to rows that are unknown, which the database would refuse."""
    known, known_runs = rows[artifacts.name], {row["id"] for row in rows[runs.name].values()}
    dropped = 0
    for row in rows[runs.name].values():
        if row["output"] is not None and (row["output"],) not in known:
            row["output"], dropped = None, dropped + 1
    for key, row in list(rows[names.name].items()):
        if (row["artifact_id"],) not in known:
            del rows[names.name][key]
            dropped += 1
        elif row["parent"] is not None and (row["parent"],) not in known:
            row["parent"], dropped = None, dropped + 1
    for key in [key for key in rows[run_inputs.name] if key[0] not in known_runs]:
        del rows[run_inputs.name][key]
        dropped += 1
    for table, column, parent in ((label_items, "batch", label_batches), (label_answers, "item", label_items)):
        for key, row in list(rows[table.name].items()):
            if (row[column],) not in rows[parent.name]:
                del rows[table.name][key]
                dropped += 1
    if dropped:
        unknown.append(f"rows that {dropped} other rows refer to")


def _insert(connection: Connection, rows: Rows, store: ArtifactStore, unknown: list[str]) -> None:
    for row in rows[artifacts.name].values():
        try:
            artifact = store.get(row["id"])
        except DamagedArtifactError as error:
            unknown.append(f"meta of {row['id']}: {error}")
            artifact = None
        # In the journal `meta` has no value, as the manifest is where it is.
        row["meta"] = json.dumps(artifact.meta if artifact else {})
        if artifact:
            row |= {"kind": artifact.kind, "size": artifact.size, "files": len(artifact.files)}
        else:
            row.setdefault("kind", row["id"].rpartition("-")[0])
            row.setdefault("size", 0)
            row.setdefault("files", 0)
    for table in JOURNALED:
        if values := [_column_values(table, row) for row in rows[table.name].values()]:
            connection.execute(insert(table), values)
        _continue_numbers(connection, table)


def _column_values(table: Table, row: Mapping[str, Any]) -> dict[str, Any]:
    return {column.name: _column_value(column.type, row.get(column.name)) for column in table.columns}


def _column_value(type: Any, value: Any) -> Any:
    if value is not None and isinstance(type, JSON):
        return json.loads(value)
    if value is not None and isinstance(type, UtcDateTime):
        return datetime.fromisoformat(value)
    return value


def _continue_numbers(connection: Connection, table: Table) -> None:
    """Lets the next row have the number after the highest one; PostgreSQL counts apart from the rows."""
    key = table.autoincrement_column
    if connection.dialect.name == "postgresql" and key is not None:
        sequence = func.pg_get_serial_sequence(table.name, key.name)
        connection.execute(
            select(func.setval(sequence, select(func.coalesce(func.max(key), 0) + 1).scalar_subquery(), False))
        )
