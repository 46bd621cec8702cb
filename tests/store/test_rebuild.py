"""A lost or damaged database is rebuilt, and a healthy one never touched."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from filled import all_rows, fill
from sqlalchemy import text

from posttrain.store.config import StoreConfig
from posttrain.store.errors import LostDatabaseError, UserError
from posttrain.store.journal import Journal
from posttrain.store.rebuild import rebuild_database
from posttrain.store.tables import schema
from posttrain.store.upgrade import VERSION_TABLE
from posttrain.store.verify import verify_artifacts, verify_database
from posttrain.store.workspace import JOURNAL, Workspace


@pytest.fixture
def filled(workspace: Workspace) -> tuple[Path, dict[str, Any]]:
    fill(workspace)
    rows = all_rows(workspace)
    workspace.close()
    return workspace.root, rows


def delete(file: Path) -> None:
    file.unlink()


def empty(file: Path) -> None:
    file.write_bytes(b"")


def overwrite(file: Path) -> None:
    file.write_bytes(b"no database, " * 1000)


def drop_rounds(file: Path) -> None:
    import sqlite3

    connection = sqlite3.connect(file)
    connection.execute("DROP TABLE rounds")
    connection.commit()
    connection.close()


def change_row(file: Path) -> None:
    import sqlite3

    connection = sqlite3.connect(file)
    connection.execute("UPDATE rounds SET candidate = 'model-0'")
    connection.commit()
    connection.close()


@pytest.mark.parametrize("damage", [delete, empty, overwrite, drop_rounds, change_row])
def test_the_rebuilt_database_has_all_rows(filled: tuple[Path, dict[str, Any]], damage: Callable[[Path], None]) -> None:
    root, rows = filled
    file = root / ".posttrain" / "store.db"
    damage(file)
    result = rebuild_database(root, StoreConfig())
    assert result is not None
    assert result.unknown == []
    assert result.replaced == (None if damage is delete else file.with_name("store.db.damaged-1"))
    with Workspace.open(root) as workspace:
        assert all_rows(workspace) == rows
        assert list(workspace.metadata.rounds()[0].detail["metrics"]) == [
            "rouge_l",
            "latency_p50",
        ]  # the main one first
        assert {row.id: row.meta["n"] for row in workspace.metadata.artifacts()}.keys() == set(
            workspace.artifacts.ids()
        )
        # It continues where it was.
        assert workspace.metadata.add_deployment(next(iter(rows["artifacts"]))[0], round=None, action="promote").id == 4
        fill(workspace)
        assert verify_database(workspace.metadata, Journal(workspace.home / JOURNAL)) == []
    assert rebuild_database(root, StoreConfig()) is None


def test_a_healthy_database_is_not_touched(filled: tuple[Path, dict[str, Any]]) -> None:
    root, _ = filled
    before = (root / ".posttrain" / "store.db").read_bytes()
    assert rebuild_database(root, StoreConfig()) is None
    (root / ".posttrain" / JOURNAL).unlink()
    assert rebuild_database(root, StoreConfig()) is None
    assert (root / ".posttrain" / "store.db").read_bytes() == before


def test_an_interrupted_rebuild_can_be_repeated(filled: tuple[Path, dict[str, Any]]) -> None:
    """Killed when the tables are there and the rows are not."""
    from posttrain.store.metadata import Metadata

    root, rows = filled
    (root / ".posttrain" / "store.db").unlink()
    Metadata(f"sqlite:///{root}/.posttrain/store.db", create=True).close()
    for enter in (Workspace.open, Workspace.create):
        with pytest.raises(LostDatabaseError, match="lacks the last"):
            enter(root)
    assert rebuild_database(root, StoreConfig()) is not None
    with Workspace.open(root) as workspace:
        assert all_rows(workspace) == rows


def test_without_a_journal_only_artifacts_are_known(filled: tuple[Path, dict[str, Any]]) -> None:
    root, rows = filled
    for name in ("store.db", JOURNAL):
        (root / ".posttrain" / name).unlink()
    result = rebuild_database(root, StoreConfig())
    assert result is not None
    assert "a run starts at round 0" in result.unknown[0]
    with Workspace.open(root) as workspace:
        assert [(row.id,) for row in workspace.metadata.artifacts()] == sorted(rows["artifacts"])
        assert verify_artifacts(workspace.artifacts, {row.id: row for row in workspace.metadata.artifacts()}) == []
        assert verify_database(workspace.metadata, Journal(workspace.home / JOURNAL)) == []


@pytest.mark.slow
def test_damaged_lines_cost_their_changes(filled: tuple[Path, dict[str, Any]]) -> None:
    root, rows = filled
    (root / ".posttrain" / "store.db").unlink()
    journal = root / ".posttrain" / JOURNAL
    lines = journal.read_bytes().splitlines(keepends=True)
    for number in range(0, len(lines), len(lines) // 3):
        journal.write_bytes(b"".join([*lines[:number], b"{}\n", *lines[number + 1 :]]))
        result = rebuild_database(root, StoreConfig())
        assert result is not None
        assert result.unknown[0] == "changes in 1 damaged lines of the journal"
        with Workspace.open(root) as workspace:
            assert all_rows(workspace)["artifacts"].keys() == rows["artifacts"].keys()
            assert verify_database(workspace.metadata, Journal(journal)) == []
        (root / ".posttrain" / "store.db").unlink()


def test_a_lost_artifact_is_said(filled: tuple[Path, dict[str, Any]]) -> None:
    root, rows = filled
    (id,) = sorted(rows["artifacts"])[0]
    shutil.rmtree(root / ".posttrain" / "artifacts" / id)
    (root / ".posttrain" / "store.db").unlink()
    result = rebuild_database(root, StoreConfig())
    assert result is not None
    assert result.unknown == [f"meta of {id}: artifact {id} is missing from {root}/.posttrain/artifacts"]
    with Workspace.open(root) as workspace:
        assert all_rows(workspace) == rows


def test_nothing_to_rebuild_from_raises(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no workspace here"):
        rebuild_database(tmp_path, StoreConfig())
    Workspace.create(tmp_path).close()
    (tmp_path / ".posttrain" / "store.db").unlink()
    with pytest.raises(UserError, match="neither a journal nor an artifact"):
        rebuild_database(tmp_path, StoreConfig())


@pytest.mark.slow
def test_postgres_and_s3(tmp_path: Path, postgres_url: str, s3_url: str) -> None:
    """An empty database on the server is refused, verified as lost, and rebuilt; one with rows is not emptied."""
    config = StoreConfig(database=postgres_url, artifacts=s3_url)
    with Workspace.create(tmp_path, config) as workspace:
        fill(workspace)
        rows = all_rows(workspace)
        tables = [*schema.tables, VERSION_TABLE]
        with workspace.metadata.transaction() as connection:
            connection.execute(text("UPDATE rounds SET candidate = NULL"))
        with pytest.raises(UserError, match="holds rows"):
            rebuild_database(tmp_path, config)
        with workspace.metadata.engine.begin() as connection:
            for table in tables:
                connection.execute(text(f"DROP TABLE {table} CASCADE"))
    for enter in (Workspace.create, Workspace.open):
        with pytest.raises(LostDatabaseError, match="the database is empty, but the workspace holds 3 artifacts"):
            enter(tmp_path, config)
    assert rebuild_database(tmp_path, config) is not None
    with Workspace.open(tmp_path, config) as workspace:
        assert all_rows(workspace) == rows
        fill(workspace)  # with numbers that follow those of the rebuilt rows
        assert verify_database(workspace.metadata, Journal(workspace.home / JOURNAL)) == []
        artifact_rows = {row.id: row for row in workspace.metadata.artifacts()}
        assert verify_artifacts(workspace.artifacts, artifact_rows) == []
        id = min(artifact_rows)
        workspace.artifacts._files.pipe_file(f"{s3_url}/{id}/file", b"9")
        (finding,) = verify_artifacts(workspace.artifacts, artifact_rows)
        assert finding.line.startswith(f"{id}: file differs from its checksum; posttrain restore")
        assert verify_artifacts(workspace.artifacts, artifact_rows, quick=True) == []
        workspace.artifacts._files.rm_file(f"{s3_url}/{id}/file")
        (finding,) = verify_artifacts(workspace.artifacts, artifact_rows, quick=True)
        assert finding.what == "file is missing"
