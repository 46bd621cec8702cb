"""A database that is missing, empty or another one is never taken for that of a new workspace."""

from pathlib import Path

import pytest
from sqlalchemy import Engine

from faults import NEEDS_SPACE, at_calls, at_transactions, in_process, kill_at
from posttrain.store.config import StoreConfig
from posttrain.store.errors import LostDatabaseError, UserError
from posttrain.store.journal import Journal
from posttrain.store.verify import verify_database
from posttrain.store.workspace import JOURNAL, Workspace


@pytest.fixture
def quick_tables() -> None:
    """Each new database runs the migrations, as outside of the tests."""


def commit(workspace: Workspace, content: bytes = b"1", kind: str = "model") -> str:
    with workspace.artifacts.temporary_folder() as folder:
        (folder / "file").write_bytes(content)
        artifact = workspace.artifacts.commit(folder, kind, {})
    workspace.metadata.add_artifact(artifact)
    return artifact.id


def test_missing_database_is_not_replaced_by_an_empty_one(workspace: Workspace) -> None:
    workspace.close()
    (workspace.home / "store.db").unlink()
    with pytest.raises(UserError, match=r"store\.db: the database is missing"):
        Workspace.open(workspace.root)
    assert not (workspace.home / "store.db").exists()


@pytest.mark.parametrize("content", [None, b""])
@pytest.mark.parametrize("trace", ["artifact", "journal"])
def test_a_lost_database_is_not_taken_for_a_new_one(workspace: Workspace, content: bytes | None, trace: str) -> None:
    if trace == "artifact":
        commit(workspace)
        (workspace.home / "journal.jsonl").unlink()
    else:
        workspace.metadata.start_run("collect pool", "key")
    workspace.close()
    file = workspace.home / "store.db"
    file.unlink()
    if content is not None:
        file.write_bytes(content)
    what = "1 artifact" if trace == "artifact" else "a journal of its changes"
    for enter in (Workspace.create, Workspace.open):
        with pytest.raises(LostDatabaseError, match=f"but the workspace holds {what}.*posttrain verify --rebuild"):
            enter(workspace.root)
    assert file.exists() is (content is not None)


def test_a_new_workspace_may_move_to_another_database(workspace: Workspace, tmp_path: Path) -> None:
    """`posttrain init` makes an SQLite file before the config names a server."""
    config = StoreConfig(database=f"sqlite:///{tmp_path}/other.db")
    with Workspace.create(workspace.root, config) as moved:
        id = commit(moved)
    with pytest.raises(LostDatabaseError, match="1 artifact"):
        Workspace.create(workspace.root, StoreConfig(database=f"sqlite:///{tmp_path}/third.db"))
    assert not (tmp_path / "third.db").exists()
    with Workspace.create(workspace.root, config) as again:
        assert [row.id for row in again.metadata.artifacts()] == [id]


def test_a_store_with_artifacts_of_another_database_is_refused(workspace: Workspace, tmp_path: Path) -> None:
    commit(workspace)
    shared = StoreConfig(artifacts=f"file://{workspace.home}/artifacts")
    with pytest.raises(LostDatabaseError, match=r"a new workspace needs a place of its own in store\.artifacts"):
        Workspace.create(tmp_path / "new", shared)


@pytest.mark.slow
def test_a_killed_first_start_goes_on(tmp_path: Path) -> None:
    """Whatever call the first process is killed before; of these every ninth."""
    for instant in range(0, 100, 9):
        root = tmp_path / str(instant)

        def start_first(root: Path = root, instant: int = instant) -> None:
            act = kill_at(instant)
            with at_calls(act, NEEDS_SPACE), at_transactions(act, Engine), Workspace.create(root) as workspace:
                commit(workspace)

        outcome = in_process(start_first)
        assert outcome.error is None
        with Workspace.create(root) as workspace:
            commit(workspace)
            assert verify_database(workspace.metadata, Journal(workspace.home / JOURNAL)) == []
        if not outcome.killed:
            break
    assert instant > 20
