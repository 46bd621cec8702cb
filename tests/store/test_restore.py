"""A restored workspace is whole, and damage to a backup is never silent."""

import random
import resource
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from backups import (
    CONFIG,
    assert_sound,
    back_up,
    content,
    damage_artifact,
    feedback,
    fill_more,
    restore,
)
from filled import all_rows, fill

from posttrain.data.feedback.inbox import Inbox
from posttrain.data.feedback.segment import inbox_problems
from posttrain.store.backup import create_backup, list_backups
from posttrain.store.backup_repository import create_repository, open_repository
from posttrain.store.config import StoreConfig
from posttrain.store.errors import StorageError, UserError, WorkError
from posttrain.store.restore_damaged import restore_damaged
from posttrain.store.workspace import Workspace


@pytest.fixture
def root(filled_workspace: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(filled_workspace, tmp_path / "workspace", symlinks=True))


STEPS = [
    *("write_atomically", "_restore_files", "_restore_artifacts", "_restore_database", "_link_champion"),
    *("Workspace.create", "Path.unlink"),
]


@pytest.mark.slow
def test_a_backup_moves_to_a_server_and_back(root: Path, tmp_path: Path, postgres_url: str, s3_url: str) -> None:
    with Workspace.open(root) as workspace:
        rows = all_rows(workspace)
    back_up(root, str(tmp_path / "one.tar"))
    config = StoreConfig(database=postgres_url, artifacts=s3_url)
    restore(str(tmp_path / "one.tar"), tmp_path / "server", config)
    assert_sound(tmp_path / "server", config)
    with Workspace.open(tmp_path / "server", config) as workspace:
        assert all_rows(workspace) == rows
        fill_more(workspace)
        rows = all_rows(workspace)
        with create_repository(str(tmp_path / "two.tar"), workspace.home) as target:
            create_backup(workspace, target)
    restore(str(tmp_path / "two.tar"), tmp_path / "local")
    assert_sound(tmp_path / "local")
    with Workspace.open(tmp_path / "local") as workspace:
        assert all_rows(workspace) == rows


@pytest.mark.slow
def test_a_database_with_other_rows_is_refused(root: Path, tmp_path: Path, postgres_url: str) -> None:
    config = StoreConfig(database=postgres_url)
    with Workspace.create(tmp_path / "other", config) as workspace:
        fill(workspace)
    back_up(root, str(tmp_path / "one.tar"))
    with pytest.raises(UserError, match="holds rows"):
        restore(str(tmp_path / "one.tar"), tmp_path / "new", config)


@pytest.mark.slow
def test_a_server_that_has_newer_rows_is_refused(root: Path, tmp_path: Path, postgres_url: str) -> None:
    """Its rows would name artifacts that the restored workspace lacks."""
    location = str(tmp_path / "one.tar")
    back_up(root, location)
    config, server = StoreConfig(database=postgres_url), tmp_path / "server"
    assert restore(location, server, config).database is None
    (server / "posttrain.yaml").write_text(CONFIG)
    with pytest.raises(UserError, match="holds rows"):
        restore(location, tmp_path / "second", config)
    second = restore(location, tmp_path / "second", config, attach=True)
    assert second.database is not None
    with Workspace.open(server, config) as workspace:
        fill_more(workspace)
    with pytest.raises(UserError, match="holds rows"):
        restore(location, tmp_path / "third", config, attach=True)
    with pytest.raises(UserError, match="holds rows"):
        restore(location, server, config, replace=True)
    assert not (server / ".posttrain.replaced-1").exists()
    assert_sound(server, config)


def test_a_copy_of_a_workspace_is_not_attached_to_its_live_database(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    location, live = str(tmp_path / "one.tar"), StoreConfig(database=f"sqlite:///{tmp_path / 'live.db'}")
    back_up(root, location)
    restore(location, tmp_path / "live", live)
    before = (tmp_path / "live.db").read_bytes()
    for _ in range(2):  # the marker of the first try must not let the second in
        with pytest.raises(UserError, match="would both write there"):
            restore(location, tmp_path / "copy", live)
    assert (tmp_path / "live.db").read_bytes() == before
    with Workspace.open(tmp_path / "live", live) as workspace:
        assert not (tmp_path / "copy" / ".posttrain" / "format.json").exists()
        rows = all_rows(workspace)
    # With a place of its own the same call goes through, also killed on the way.
    own = StoreConfig(database=f"sqlite:///{tmp_path / 'own.db'}")

    def killed(workspace: Workspace) -> list[str]:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("posttrain.store.restore._link_champion", killed)
        with pytest.raises(KeyboardInterrupt):
            restore(location, tmp_path / "copy", own)
    restore(location, tmp_path / "copy", own)
    with Workspace.open(tmp_path / "copy", own) as workspace:
        assert all_rows(workspace) == rows
    assert restore(location, tmp_path / "again", live, attach=True).database == str(tmp_path / "live.db")
    # In its own place, a workspace keeps its database.
    (tmp_path / "live" / "posttrain.yaml").write_text(CONFIG)
    assert restore(location, tmp_path / "live", live, replace=True).replaced is not None


@pytest.mark.slow
def test_a_copy_of_a_workspace_is_not_attached_to_its_live_artifacts(root: Path, tmp_path: Path, s3_url: str) -> None:
    location, live = str(tmp_path / "one.tar"), StoreConfig(artifacts=s3_url)
    back_up(root, location)
    restore(location, tmp_path / "live", live)
    with pytest.raises(UserError, match="would both write there"):
        restore(location, tmp_path / "copy", live)
    assert_sound(tmp_path / "live", live)
    restore(location, tmp_path / "copy", live, attach=True)


def test_only_what_is_damaged_is_restored(root: Path, tmp_path: Path) -> None:
    back_up(root, str(tmp_path / "one.tar"))
    before = content(root)
    id = damage_artifact(root)
    shutil.rmtree(next(path for path in (root / ".posttrain" / "artifacts").iterdir() if path.name > id))
    segment = root / ".posttrain" / "inbox" / "segments" / "000001.jsonl"
    segment.write_bytes(segment.read_bytes()[:-20])
    with Workspace.open(root) as workspace:
        fill_more(workspace)  # newer than the backup: it stays
        rows = all_rows(workspace)
    with Workspace.open(root) as workspace, open_repository(str(tmp_path / "one.tar"), workspace.home) as source:
        segments = dict(inbox_problems(workspace.home / "inbox"))
        restored, missing = restore_damaged(source, list_backups(source), workspace, segments)
        assert (len(restored), missing) == (3, [])
        assert all_rows(workspace).keys() == rows.keys()
        assert len(all_rows(workspace)["runs"]) == len(rows["runs"])
    assert content(root) == before
    assert_sound(root)


@pytest.mark.parametrize(("lost", "fork"), [(1, False), (4, False), (5, True)])
def test_feedback_of_another_workspace_is_not_restored(root: Path, tmp_path: Path, lost: int, fork: bool) -> None:
    """In a location with backups of two workspaces, whose segments have the same names; the other may be a fork."""
    location = f"{tmp_path / 'backups'}/"
    other = tmp_path / "other" / root.name
    if fork:
        shutil.copytree(root, other, symlinks=True)
    else:
        Workspace.create(other).close()
    for folder, numbers in ((root, range(10, 16)), (other, range(20, 40))):
        with Inbox(folder / ".posttrain" / "inbox", segment_bytes=300) as inbox:
            for number in numbers:
                inbox.append(feedback(number)).result()
    before = content(root)
    back_up(root, location)
    back_up(other, location)
    with Workspace.open(root) as workspace, open_repository(location, workspace.home) as source:
        backups = list_backups(source)
        assert restore_damaged(source, backups, workspace, {}) == ([], [])
        assert content(root) == before
        path = root / ".posttrain" / "inbox" / "segments" / f"{lost:06d}.jsonl"
        path.unlink()
        segments = dict(inbox_problems(workspace.home / "inbox"))
        assert list(segments) == [path]
        of_other = restore_damaged(source, backups[1:], workspace, segments)
        assert of_other == ([], [f"{path.relative_to(root)}: is missing"])
        restored, missing = restore_damaged(source, backups, workspace, segments)
        assert (restored, missing) == ([path.relative_to(root).as_posix()], [])
    assert content(root) == before


def test_a_damaged_open_segment_is_named(root: Path, tmp_path: Path) -> None:
    with Inbox(root / ".posttrain" / "inbox") as inbox:
        inbox.append(feedback(10)).result()
    back_up(root, str(tmp_path / "one.tar"))
    (path,) = (root / ".posttrain" / "inbox" / "segments").glob("*.open")
    path.write_bytes(path.read_bytes().replace(b"question", b"kuestion", 1))
    with Workspace.open(root) as workspace, open_repository(str(tmp_path / "one.tar"), workspace.home) as source:
        segments = dict(inbox_problems(workspace.home / "inbox"))
        assert restore_damaged(source, list_backups(source), workspace, segments)[1] == [
            f"{path.relative_to(root)}: line 1 does not match its checksum"
        ]


@pytest.mark.slow
def test_a_damaged_backup_is_never_restored_in_silence(root: Path, tmp_path: Path) -> None:
    back_up(root, str(tmp_path / "one.tar"))
    whole = (tmp_path / "one.tar").read_bytes()
    restore(str(tmp_path / "one.tar"), tmp_path / "reference")
    expected = content(tmp_path / "reference")
    draw, refused, incomplete = random.Random(0), 0, 0
    for number in range(20):
        damaged = bytearray(whole)
        if number % 6 == 0:
            del damaged[draw.randrange(len(whole)) :]
        else:
            # In blocks of any kind: most bytes are the pool's.
            at = draw.randrange(0, len(whole), 512) if number % 2 else draw.randrange(len(whole) - 20_000, len(whole))
            for offset in range(at, min(at + draw.choice((1, 100, 600)), len(whole))):
                damaged[offset] ^= draw.randrange(1, 256)
        (tmp_path / "damaged.tar").write_bytes(damaged)
        copy = tmp_path / "copy"
        try:
            report = restore(str(tmp_path / "damaged.tar"), copy)
        except (UserError, WorkError):
            refused += 1
        else:
            incomplete += bool(report.missing)
            if not report.missing:
                assert content(copy) == expected
                assert_sound(copy)
        shutil.rmtree(copy, ignore_errors=True)
    assert refused > 3
    assert incomplete > 3


def test_a_workspace_is_never_overwritten(root: Path, tmp_path: Path) -> None:
    location = str(tmp_path / "one.tar")
    back_up(root, location)
    before = content(root)
    with pytest.raises(UserError, match="there is a workspace already"):
        restore(location, root)
    assert content(root) == before
    (root / "labels" / "round-1.csv").write_text("newer")
    report = restore(location, root, replace=True)
    assert report.kept == ["labels/round-1.csv"]
    assert (root / "labels" / "round-1.csv").read_text() == "newer"
    assert report.replaced is not None
    assert (report.replaced / "store.db").exists()
    assert_sound(root)


def test_a_workspace_in_use_is_not_replaced(root: Path, tmp_path: Path) -> None:
    location = str(tmp_path / "one.tar")
    back_up(root, location)
    with Workspace.open(root) as workspace, workspace.lock(), pytest.raises(UserError, match="another posttrain works"):
        restore(location, root, replace=True)
    with Inbox(root / ".posttrain" / "inbox"), pytest.raises(UserError, match="collects feedback"):
        restore(location, root, replace=True)
    assert_sound(root)


def test_a_foreign_backup_writes_and_reads_nothing_elsewhere(workspace: Workspace, tmp_path: Path) -> None:
    for number, (name, source) in enumerate(
        (
            ("../outside", "files/0"),
            ("/tmp/outside", "files/0"),
            (".posttrain/store.db", "files/0"),
            (".posttrain/../../outside", "files/0"),
            ("inside", "/etc/passwd"),
            ("inside", "../../outside"),
            ("inside", "files/1"),
        )
    ):
        location = f"{tmp_path / f'backups {number}'}/"
        with create_repository(location, workspace.home) as target:
            backup = list_of_one_file(name, source)
            with workspace.artifacts.temporary_folder() as folder:
                (folder / "files").mkdir()
                (folder / "files" / "0").write_text("x")
                target.add_copy(folder, workspace.artifacts.seal(folder, "backup", backup))
        with pytest.raises(UserError, match="holds no backup"):
            restore(location, tmp_path / "new")


def list_of_one_file(name: str, source: str) -> dict[str, object]:
    values = {"created_at": "2026-01-01T00:00:00+00:00", "workspace": "w", "version": "0", "rows": 0}
    return {**values, "artifacts": [], "missing": [], "files": {name: source}}


def test_artifacts_of_a_foreign_tar_stay_in_their_folder(tmp_path: Path) -> None:
    from posttrain.store.artifacts import Artifact, FileEntry, parse_manifest

    for name in ("../outside", "/outside", "a/../../outside"):
        with pytest.raises(ValueError, match="outside the artifact"):
            parse_manifest(Artifact("", "model", {}, {name: FileEntry("0" * 64, 1)}).manifest)


def test_a_full_disk_ends_a_restore_that_can_be_repeated(
    root: Path, tmp_path: Path, small_files: Callable[[int], None]
) -> None:
    back_up(root, f"{tmp_path / 'backups'}/")
    soft = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    small_files(1_000_000)
    with pytest.raises(StorageError):
        restore(str(tmp_path / "backups"), tmp_path / "new")
    small_files(soft)
    with pytest.raises(UserError):
        Workspace.open(tmp_path / "new")
    restore(str(tmp_path / "backups"), tmp_path / "new")
    assert_sound(tmp_path / "new")


@pytest.mark.parametrize(("step", "late"), [*((step, False) for step in STEPS), ("_link_champion", True)])
def test_a_restore_that_is_killed_anywhere_can_be_repeated(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str, late: bool
) -> None:
    """Before each step, and after the last."""
    from posttrain.store import restore as module

    location, new = str(tmp_path / "one.tar"), tmp_path / "new"
    back_up(root, location)
    owner: object = module
    if "." in step:
        owner, step = getattr(module, step.partition(".")[0]), step.partition(".")[2]
    function = getattr(owner, step)

    def killed(*arguments: Any, **options: Any) -> None:
        if late:
            function(*arguments, **options)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(owner, step, killed)
        with pytest.raises(KeyboardInterrupt):
            restore(location, new)
    try:
        restore(location, new)
    except UserError:
        assert (new / ".posttrain" / "format.json").exists()  # nothing was left to do
    assert_sound(new)
    with Workspace.open(new) as workspace:
        assert workspace.champion_path.resolve().name == workspace.metadata.deployments()[-1].model_id


def test_backups_of_several_workspaces_are_not_confused(root: Path, tmp_path: Path) -> None:
    location = f"{tmp_path / 'backups'}/"
    back_up(root, location)
    with Workspace.create(tmp_path / "second") as workspace:
        fill(workspace)
    second = back_up(tmp_path / "second", location)
    with pytest.raises(UserError, match="several workspaces"):
        restore(location, tmp_path / "new")
    restore(location, tmp_path / "new", id=second.id.removeprefix("backup-")[:8])
    assert not (tmp_path / "new" / "pool.csv").exists()


def test_what_is_no_backup_is_named(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("text" * 1000)
    (tmp_path / "empty").mkdir()
    for name in ("text", "empty", "missing"):
        with pytest.raises(UserError, match="backup"):
            restore(str(tmp_path / name), tmp_path / "new")
    with pytest.raises(UserError, match="something else"), create_repository(str(tmp_path), tmp_path):
        pass
