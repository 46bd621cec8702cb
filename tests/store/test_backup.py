"""A backup is the workspace as it was at one moment, and copies only what is new."""

import json
import os
import resource
import shutil
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from backups import (
    assert_sound,
    back_up,
    content,
    damage_artifact,
    feedback,
    fill_more,
    restore,
)
from filled import all_rows

from faults import in_process
from posttrain.data.feedback.inbox import Inbox
from posttrain.data.feedback.ingest import ingest
from posttrain.data.feedback.segment import count_entries
from posttrain.store.backup import create_backup, list_backups, segments_to_leave_out
from posttrain.store.backup_repository import create_repository, open_repository
from posttrain.store.errors import StorageError
from posttrain.store.workspace import Workspace


@pytest.fixture
def root(filled_workspace: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(filled_workspace, tmp_path / "workspace", symlinks=True))


@pytest.fixture(params=["file", "folder", "s3"])
def location(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A location of backups of each kind."""
    if request.param == "s3":
        return str(request.getfixturevalue("s3_url"))
    return str(tmp_path / "backup.tar") if request.param == "file" else f"{tmp_path / 'backups'}/"


@pytest.mark.slow
def test_a_restored_workspace_equals_the_one_that_was_backed_up(root: Path, location: str, tmp_path: Path) -> None:
    with Workspace.open(root) as workspace:
        rows, model = all_rows(workspace), workspace.champion_path.resolve().name
    report = back_up(root, location)
    assert (report.artifacts, report.damaged) == (3, [])
    restored = restore(location, tmp_path / "new")
    assert (restored.artifacts, restored.missing, restored.kept) == (3, [], [])
    expected = content(root)
    del expected["unrelated.bin"]  # the config does not name it
    assert content(tmp_path / "new") == expected
    with Workspace.open(tmp_path / "new") as workspace:
        assert all_rows(workspace) == rows
        assert list(workspace.metadata.rounds()[0].detail["metrics"]) == [
            "rouge_l",
            "latency_p50",
        ]  # the main one first
        assert workspace.champion_path.resolve().name == model
        fill_more(workspace)  # the numbers of runs and deployments continue
    assert_sound(tmp_path / "new")


def test_all_that_the_config_names_is_in_the_backup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the folder is called, and however the config writes a path."""
    root = tmp_path / "support [1]*"
    Workspace.create(root).close()
    monkeypatch.setenv("HOME", str(tmp_path))
    config = {
        "data": {"pool": ["a[b].csv", ".hidden.csv", f"{root}/absolute.csv", "~/support [1]*/home.csv"]},
        "evaluate": {"metrics": {"mine": "named.inner.module:metric"}},
        "steps": [{"against": "sets/**/*.csv"}, {"keep": ".*"}, {"text": "a long text " * 100}],
    }
    (root / "posttrain.yaml").write_text(json.dumps(config), encoding="utf-8")
    names = ["a[b].csv", ".hidden.csv", "absolute.csv", "home.csv", "sets/one/two/three.csv", "top.py"]
    names += ["named/inner/module.py", "package/__init__.py", "package/inner/part.py"]
    others = ["ab.csv", "unnamed/module.py", ".git/config", "package/__pycache__/part.py", ".posttrain/tmp/x"]
    for name in names + others:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(name, encoding="utf-8")
    location = str(tmp_path / "one.tar")
    back_up(root, location)
    with open_repository(location, root / ".posttrain") as source:
        assert sorted(list_backups(source)[-1].files) == sorted(["posttrain.yaml", *names])


@pytest.mark.parametrize("kind", ["folder", "s3"])
@pytest.mark.slow
def test_the_next_backup_copies_only_what_is_new(
    root: Path, kind: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    location = str(request.getfixturevalue("s3_url")) if kind == "s3" else f"{tmp_path / 'backups'}/"
    first = back_up(root, location)
    assert first.copied == 4  # three artifacts and the pool
    (root / "labels" / "round-1.csv").write_text("changed")
    with Workspace.open(root) as workspace, workspace.artifacts.temporary_folder() as folder:
        (folder / "file").write_bytes(b"new")
        workspace.metadata.add_artifact(workspace.artifacts.commit(folder, "model", {}))
    second = back_up(root, location)
    assert (second.artifacts, second.copied, second.copied_size) == (4, 1, 3)
    with open_repository(location, tmp_path / "other") as source:
        assert [backup.id for backup in list_backups(source)] == [first.id, second.id]
    restore(location, tmp_path / "old", id=first.id)
    restore(location, tmp_path / "latest")
    assert (tmp_path / "old" / "labels" / "round-1.csv").read_text() != "changed"
    assert (tmp_path / "latest" / "labels" / "round-1.csv").read_text() == "changed"
    for name in ("old", "latest"):
        assert_sound(tmp_path / name)


@pytest.mark.slow
def test_backups_while_others_write_are_of_one_moment(root: Path, tmp_path: Path) -> None:
    """Every backup holds a prefix of the rows, all artifacts of these rows, and no less feedback than it began with."""
    ended = threading.Event()
    acknowledged: list[int] = []
    inbox_folder = root / ".posttrain" / "inbox"

    def write() -> None:
        with Workspace.open(root) as workspace:
            for number in range(1000):
                if ended.wait(0.01):
                    return
                with workspace.artifacts.temporary_folder() as folder:
                    (folder / "file").write_bytes(b"%d" % number)
                    artifact = workspace.artifacts.commit(folder, "extra", {"n": number})
                with workspace.metadata.transaction():
                    workspace.metadata.add_artifact(artifact)
                    workspace.metadata.name_artifact("extra", artifact.id, workspace.metadata.named("extra"))

    def collect() -> None:
        with Inbox(inbox_folder, segment_bytes=400) as inbox:
            for number in range(100, 100_000):
                if ended.wait(0.002):
                    return
                inbox.append(feedback(number)).result()
                acknowledged.append(number)

    threads = [threading.Thread(target=write), threading.Thread(target=collect)]
    for thread in threads:
        thread.start()
    counts = []
    try:
        for number in range(3):
            before = len(acknowledged)
            back_up(root, str(tmp_path / f"{number}.tar"))
            counts.append((before, len(acknowledged)))
    finally:
        ended.set()
        for thread in threads:
            thread.join()
    with Workspace.open(root) as workspace:
        versions = [named.artifact_id for named in workspace.metadata.names() if named.name == "extra"]
    for number, (before, after) in enumerate(counts):
        copy = tmp_path / f"copy {number}"
        assert restore(str(tmp_path / f"{number}.tar"), copy).missing == []
        assert_sound(copy)
        with Workspace.open(copy) as workspace:
            extra = [named.artifact_id for named in workspace.metadata.names() if named.name == "extra"]
            assert extra == versions[: len(extra)]
            assert len(workspace.metadata.artifacts("extra")) == len(extra)
        assert 6 + before <= count_entries(copy / ".posttrain" / "inbox") <= 6 + after + 1
    assert len(acknowledged) > counts[0][0]


def test_feedback_that_was_taken_meanwhile_is_not_lost(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A segment that is taken after the rows were read is not marked as taken in the backup."""
    inbox = root / ".posttrain" / "inbox"
    first = ingest(inbox)[0]
    first.done()
    from posttrain.store import backup

    read_rows = backup._read_rows

    def take_the_rest(database: object) -> object:
        rows = read_rows(database)  # type: ignore[arg-type]
        for batch in ingest(inbox):
            batch.done()
        return rows

    monkeypatch.setattr(backup, "_read_rows", take_the_rest)
    back_up(root, str(tmp_path / "one.tar"))
    restore(str(tmp_path / "one.tar"), tmp_path / "new")
    again = ingest(tmp_path / "new" / ".posttrain" / "inbox")
    assert sum(batch.counts["labelled"] for batch in again) == 6 - first.counts["labelled"]


def test_an_artifact_that_is_removed_meanwhile_is_no_damage(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Workspace.open(root) as workspace:
        with workspace.artifacts.temporary_folder() as folder:
            (folder / "file").write_bytes(b"unused")
            unused = workspace.artifacts.commit(folder, "aaa", {})
        workspace.metadata.add_artifact(unused)
        path = workspace.artifacts.path

        def remove(id: str) -> Path:
            if id == unused.id:
                workspace.metadata.forget_artifact(id)
                workspace.artifacts.delete(id)
            return path(id)

        monkeypatch.setattr(workspace.artifacts, "path", remove)
        with create_repository(str(tmp_path / "one.tar"), workspace.home) as target:
            report = create_backup(workspace, target)
    assert (report.artifacts, report.damaged) == (3, [])


def test_a_killed_backup_can_be_repeated(root: Path, tmp_path: Path) -> None:
    """Killed amid its first artifact, it leaves a folder with nothing but temporary files."""
    left = tmp_path / "backups" / ".tmp" / ("0" * 32)
    left.mkdir(parents=True)
    (left.with_suffix(".lock")).touch()
    (left / "file").write_bytes(b"half")
    assert back_up(root, f"{tmp_path / 'backups'}/").damaged == []
    assert not left.exists()


def test_what_a_killed_backup_to_a_file_left_is_removed(root: Path, tmp_path: Path) -> None:
    places = tmp_path / "places"
    places.mkdir()

    def killed() -> None:
        with create_repository(str(places / "one.tar"), root / ".posttrain"):
            os.kill(os.getpid(), signal.SIGKILL)

    assert in_process(killed).killed
    assert os.listdir(places)
    back_up(root, str(places / "one.tar"))
    assert os.listdir(places) == ["one.tar"]


def test_a_damaged_artifact_is_named_and_the_rest_backed_up(root: Path, tmp_path: Path) -> None:
    id = damage_artifact(root)
    report = back_up(root, str(tmp_path / "one.tar"))
    assert report.artifacts == 2
    assert [id in line for line in report.damaged] == [True]
    restored = restore(str(tmp_path / "one.tar"), tmp_path / "new")
    assert restored.artifacts == 2
    assert restored.missing[0] == f"{id}: it was damaged when the backup was made"


def test_a_full_disk_leaves_no_half_backup(root: Path, tmp_path: Path, small_files: Callable[[int], None]) -> None:
    soft = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    for location in (str(tmp_path / "one.tar"), f"{tmp_path / 'backups'}/"):
        small_files(1_000_000)
        with pytest.raises(StorageError):
            back_up(root, location)
        small_files(soft)
        assert not (tmp_path / "one.tar").exists()
        assert not list(tmp_path.glob(".one.tar*"))
    report = back_up(root, f"{tmp_path / 'backups'}/")
    assert report.damaged == []
    restore(str(tmp_path / "backups"), tmp_path / "new")
    assert_sound(tmp_path / "new")


def test_only_the_owner_reads_a_backup(root: Path, tmp_path: Path) -> None:
    back_up(root, str(tmp_path / "one.tar"))
    back_up(root, f"{tmp_path / 'backups'}/")
    assert (tmp_path / "one.tar").stat().st_mode & 0o077 == 0
    assert (tmp_path / "backups").stat().st_mode & 0o077 == 0


def test_a_read_only_workspace_can_be_backed_up(
    root: Path, open_folder: Path, unprivileged: Callable[[Callable[[], object]], dict[str, object]]
) -> None:
    copy = Path(shutil.copytree(root, open_folder / "workspace", symlinks=True))
    (open_folder / "out").mkdir(mode=0o777)
    (open_folder / "out").chmod(0o777)
    for path in [copy, *copy.rglob("*")]:
        if not path.is_symlink():
            path.chmod(0o555 if path.is_dir() else 0o444)
    outcome = unprivileged(lambda: back_up(copy, str(open_folder / "out" / "one.tar")).artifacts)
    assert (outcome.value, outcome.error) == (3, None)
    for path in [copy, *copy.rglob("*")]:
        if path.is_dir() and not path.is_symlink():
            path.chmod(0o755)


def test_an_empty_folder_of_another_user_is_a_place(
    root: Path, open_folder: Path, unprivileged: Callable[[Callable[[], object]], dict[str, object]]
) -> None:
    """Such as a share, whose mode only its owner changes."""
    copy = Path(shutil.copytree(root, open_folder / "workspace", symlinks=True))
    (open_folder / "share").mkdir()
    (open_folder / "share").chmod(0o777)
    for path in (copy, *copy.rglob("*")):
        if not path.is_symlink():
            path.chmod(0o777 if path.is_dir() else 0o666)
    outcome = unprivileged(lambda: back_up(copy, str(open_folder / "share")).artifacts)
    assert (outcome.value, outcome.error) == (3, None)
    assert (open_folder / "share").stat().st_mode & 0o777 == 0o777


@pytest.mark.parametrize(
    ("files", "left_out"),
    [
        ("1.jsonl 2.jsonl 3.open", ""),
        ("1.jsonl 2.jsonl 2.open 3.open", "2.open"),
        ("1.jsonl 3.jsonl 4.open", "3.jsonl 4.open"),  # the listing missed the second
        ("1.jsonl 2.open 3.jsonl 4.open", "3.jsonl 4.open"),  # it was sealed after its copy
        ("1.open", ""),
        ("", ""),
    ],
)
def test_a_segment_that_a_listing_missed_ends_the_feedback_of_a_backup(files: str, left_out: str) -> None:
    folder = ".posttrain/inbox/segments"
    paths = [f"{folder}/{name.zfill(12)}" for name in files.split()]
    expected = {f"{folder}/{name.zfill(12)}" for name in left_out.split()}
    assert segments_to_leave_out([*paths, f"{folder}/000001.taken", "labels/3.open", "posttrain.yaml"]) == expected
