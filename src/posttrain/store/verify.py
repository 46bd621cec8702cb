"""Verifies the store: artifacts against their manifests, the database's rows against manifests and journal."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, Text, inspect, select, text, type_coerce

from posttrain.store.artifacts import ArtifactStore
from posttrain.store.database import RECOVER
from posttrain.store.errors import DamagedArtifactError, DamagedDatabaseError, LostDatabaseError
from posttrain.store.journal import Journal, Rows, read_journal
from posttrain.store.journaled_database import JOURNALED, JournaledDatabase, read_rows
from posttrain.store.progress import progress_bar
from posttrain.store.rows import ArtifactRow
from posttrain.store.tables import artifacts as artifact_table
from posttrain.store.tables import schema

RESTORE = "posttrain restore BACKUP --damaged; `posttrain run` builds it again where a round in progress needs it"

_DELETE_JOURNAL = "remove the file: the next `posttrain run` writes it again from the database"


@dataclass(frozen=True)
class Finding:
    """Damage: a file, artifact or row, what is wrong with it, and what to do."""

    where: str
    what: str
    fix: str

    @property
    def line(self) -> str:
        """The finding in one line."""
        return f"{self.where}: {self.what}; {self.fix}"


def verify_artifacts(artifacts: ArtifactStore, rows: dict[str, ArtifactRow], *, quick: bool = False) -> list[Finding]:
    """Compares all artifacts with their manifests, and the manifests with the database's rows.

    Args:
        artifacts: The store.
        rows: The database's rows of artifacts by id.
        quick: True compares sizes, and reads no file but the manifests.
    """
    # An artifact without a row is not damage: a killed build leaves one, and the next run takes it over.
    ids = sorted({*artifacts.ids(), *rows})
    findings = []
    with progress_bar("verifying", len(ids), "artifacts") as advance:
        for id in ids:
            problems = artifacts.verify_sizes(id) if quick else artifacts.verify(id)
            # The store's own lines about a lost manifest begin with the artifact's id.
            findings += [Finding(id, problem.removeprefix(f"artifact {id} "), RESTORE) for problem in problems]
            if id in rows and not problems:
                findings += compare_with_manifest(artifacts, rows[id])
            advance(1)
    return findings


def compare_with_manifest(artifacts: ArtifactStore, row: ArtifactRow) -> list[Finding]:
    """Compares an artifact's row with its manifest; returns a finding for each column that differs."""
    try:
        artifact = artifacts.get(row.id)
    except DamagedArtifactError:
        return []  # a finding of its own
    values = {"kind": artifact.kind, "meta": artifact.meta, "size": artifact.size, "files": len(artifact.files)}
    return [
        Finding(f"artifacts, row {row.id}", f"`{name}` differs from the artifact's manifest", RECOVER)
        for name, value in values.items()
        if getattr(row, name) != value
    ]


def verify_database(database: JournaledDatabase, journal: Journal, *, quick: bool = False) -> list[Finding]:
    """Checks the database's file, and its rows against the journal.

    Args:
        database: An open database.
        journal: Its journal.
        quick: True leaves the indexes of an SQLite file out.
    """
    try:
        # One reading transaction: other processes may write meanwhile.
        with database.reading() as connection:
            findings = [
                Finding(database.location, problem, RECOVER) for problem in _file_problems(connection, quick=quick)
            ]
            if findings:
                return findings
            findings = [*_unreadable_meta(connection, database.location)]
            position = database.position()
            rows: Rows = {table.name: read_rows(connection, table) for table in JOURNALED}
            shared = connection.dialect.name == "postgresql"
    except (DamagedDatabaseError, LostDatabaseError) as error:
        return [database_finding(database.location, error)]
    return findings + _compare_with_journal(journal, rows, position, database.location, shared=shared)


def _unreadable_meta(connection: Connection, location: str) -> Iterator[Finding]:
    # The journal leaves `meta` out, since manifests have it, and a row that cannot be read is compared with none.
    for id, meta in connection.execute(select(artifact_table.c.id, type_coerce(artifact_table.c.meta, Text))):
        try:
            if isinstance(meta, str):
                json.loads(meta)
        except ValueError:
            yield Finding(f"{location}, artifacts, row {id}", "`meta` is not JSON", RECOVER)


def database_finding(location: str, error: Exception) -> Finding:
    """Returns the finding for an error that says why the database cannot be opened or read."""
    what = getattr(error, "what", None) or str(error).removeprefix(f"{location}: ").partition(";")[0]
    return Finding(location, what, RECOVER)


def _file_problems(connection: Connection, *, quick: bool) -> list[str]:
    problems = []
    if connection.dialect.name == "sqlite":
        # The quick check compares no index with its table.
        check = "quick_check" if quick else "integrity_check"
        lines = [str(line) for line in connection.scalars(text(f"PRAGMA {check}"))]
        problems += [line for line in lines if line != "ok"]
        if not problems:
            broken = connection.execute(text("PRAGMA foreign_key_check")).all()
            problems += [f"a row of {row[0]} refers to a row of {row[2]} that is missing" for row in broken]
    tables = inspect(connection).get_table_names()
    return problems + [f"the table {name} is missing" for name in schema.tables if name not in tables]


def _compare_with_journal(journal: Journal, rows: Rows, position: int, location: str, *, shared: bool) -> list[Finding]:
    where = str(journal.path)
    content = read_journal(journal.path)
    if content.damaged:
        numbers = ", ".join(map(str, content.damaged))
        return [Finding(where, f"line {numbers} does not match its checksum", _DELETE_JOURNAL)]
    if content.last > position + 1:
        what = f"lacks the last {content.last - position} changes that {where} holds"
        return [Finding(location, what, RECOVER)]
    if content.missing(position):
        # Workspaces on other hosts may write to one server, each with a journal of its own changes.
        missing = f"lacks {len(content.missing(position))} of the database's {position} changes"
        what = missing if content.entries else "is missing or empty"
        return [] if shared else [Finding(where, what, _DELETE_JOURNAL)]
    expected = content.rows(position)
    findings = []
    for table in JOURNALED:
        present, known = rows[table.name], expected.get(table.name, {})
        for key in sorted({*present, *known}, key=str):
            if problem := _row_problem(present.get(key), known.get(key)):
                name = f"{table.name}, row {' '.join(str(part) for part in key if part != '')}"
                findings.append(Finding(f"{location}, {name}", problem, RECOVER))
    return findings


def _row_problem(present: dict[str, Any] | None, known: dict[str, Any] | None) -> str | None:
    if present is None:
        return "the row is missing"
    if known is None:
        return "the journal does not know this row"
    differing = [f"`{name}`" for name, value in present.items() if value != known.get(name)]
    return f"{', '.join(differing)} differs from the journal" if differing else None
