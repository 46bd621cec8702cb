"""A restored backup is the workspace as it was at one moment, and damage to a backup is never silent."""

import json
import os
import random
import resource
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from filled import all_rows, fill

from posttrain.data.feedback.entries import Feedback
from posttrain.data.feedback.inbox import Inbox
from posttrain.data.feedback.ingest import ingest
from posttrain.data.feedback.segment import count_entries, inbox_problems
from posttrain.store.backup import BackupReport, create_backup, list_backups
from posttrain.store.backup_place import new_place, open_place
from posttrain.store.config import StoreConfig
from posttrain.store.errors import StorageError, UserError, WorkError
from posttrain.store.restore import RestoreReport, choose_backup, restore_backup
from posttrain.store.restore_damaged import restore_damaged
from posttrain.store.verify import verify_artifacts, verify_database
from posttrain.store.workspace import Workspace

DEFAULT = StoreConfig()

CONFIG = "model: tiny\ndata: {pool: [pool.csv], test: sets/*.csv}\n"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A workspace with rows in each table, files of every kind, and feedback in an open and a sealed segment."""
    root = tmp_path / "workspace"
    with Workspace.create(root) as workspace:
        fill(workspace)
        workspace.link_champion(workspace.metadata.deployments()[-1].model_id)
    files = {
        "posttrain.yaml": CONFIG,
        "pool.csv": "text\n" + "a line\n" * 200_000,  # large enough to be an artifact of its own
        "sets/test.csv": "text,label\n",
        "labels/round-1.csv": "id,prompt,label\n1,a,b\n",
        "data/labelled/feedback-000001-labelled.jsonl": "{}\n",
        "selector.py": "VALUE = 1\n",
        "unrelated.bin": "0",
        ".posttrain/metrics/key.jsonl": '{"step": 1}\n',
    }
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text, encoding="utf-8")
    with Inbox(root / ".posttrain" / "inbox", segment_bytes=300) as inbox:
        for number in range(6):
            inbox.append(feedback(number)).result()
    return root


def feedback(number: int) -> Feedback:
    return Feedback.model_validate(
        {"id": f"id-{number}", "prompt": f"question {number}", "completion": "a", "rating": "up"}
    )


def back_up(root: Path, place: str) -> BackupReport:
    with Workspace.open(root, write=False) as workspace, new_place(place, workspace.home) as target:
        return create_backup(workspace, target)


def restore(
    place: str,
    root: Path,
    config: StoreConfig = DEFAULT,
    id: str | None = None,
    **options: bool,
) -> RestoreReport:
    with open_place(place, root / ".posttrain") as source:
        return restore_backup(source, choose_backup(source, id, place), root, lambda: config, **options)


def content(root: Path) -> dict[str, bytes]:
    """Every file that a restored workspace shares with the one that was backed up, by its name."""
    names = (
        [path for path in root.rglob("*") if path.is_file() and ".posttrain" not in path.parts]
        + list((root / ".posttrain" / "artifacts").rglob("*.*"))
        + [path for path in (root / ".posttrain" / "inbox").rglob("*") if path.suffix not in ("", ".lock", ".json")]
        + list((root / ".posttrain" / "metrics").rglob("*"))
    )
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in names if path.is_file()}


def assert_sound(root: Path, config: StoreConfig = DEFAULT) -> None:
    with Workspace.open(root, config) as workspace, workspace.lock():
        rows = {row.id: row for row in workspace.metadata.artifacts()}
        assert verify_artifacts(workspace.artifacts, rows) == []
        journal = workspace.metadata.journal
        assert journal is not None
        assert verify_database(workspace.metadata, journal) == []
        assert list(inbox_problems(workspace.home / "inbox")) == []


@pytest.fixture(params=["file", "folder", "s3"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A place of backups of each kind."""
    if request.param == "s3":
        return str(request.getfixturevalue("s3_url"))
    return str(tmp_path / "backup.tar") if request.param == "file" else f"{tmp_path / 'backups'}/"


def test_a_restored_workspace_equals_the_one_that_was_backed_up(root: Path, place: str, tmp_path: Path) -> None:
    with Workspace.open(root) as workspace:
        rows, model = all_rows(workspace), workspace.champion_path.resolve().name
    report = back_up(root, place)
    assert (report.artifacts, report.damaged) == (3, [])
    restored = restore(place, tmp_path / "new")
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
    place = str(tmp_path / "one.tar")
    back_up(root, place)
    with open_place(place, root / ".posttrain") as source:
        assert sorted(list_backups(source)[-1].files) == sorted(["posttrain.yaml", *names])


def fill_more(workspace: Workspace) -> None:
    """Writes a row after all others."""
    run = workspace.metadata.start_run("train", "another key")
    workspace.metadata.fail_run(run.id, "boom")
    assert workspace.metadata.runs()[-1].id == run.id  # by its number


@pytest.mark.parametrize("kind", ["folder", "s3"])
def test_the_next_backup_copies_only_what_is_new(
    root: Path, kind: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    place = str(request.getfixturevalue("s3_url")) if kind == "s3" else f"{tmp_path / 'backups'}/"
    first = back_up(root, place)
    assert first.copied == 4  # three artifacts and the pool
    (root / "labels" / "round-1.csv").write_text("changed")
    with Workspace.open(root) as workspace, workspace.artifacts.temporary_folder() as folder:
        (folder / "file").write_bytes(b"new")
        workspace.metadata.add_artifact(workspace.artifacts.commit(folder, "model", {}))
    second = back_up(root, place)
    assert (second.artifacts, second.copied, second.copied_size) == (4, 1, 3)
    with open_place(place, tmp_path / "other") as source:
        assert [backup.id for backup in list_backups(source)] == [first.id, second.id]
    restore(place, tmp_path / "old", id=first.id)
    restore(place, tmp_path / "latest")
    assert (tmp_path / "old" / "labels" / "round-1.csv").read_text() != "changed"
    assert (tmp_path / "latest" / "labels" / "round-1.csv").read_text() == "changed"
    for name in ("old", "latest"):
        assert_sound(tmp_path / name)


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
        with new_place(str(tmp_path / "two.tar"), workspace.home) as target:
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
    place = str(tmp_path / "one.tar")
    back_up(root, place)
    config, server = StoreConfig(database=postgres_url), tmp_path / "server"
    assert restore(place, server, config).database is None
    (server / "posttrain.yaml").write_text(CONFIG)
    second = restore(place, tmp_path / "second", config)
    assert second.database is not None
    with Workspace.open(server, config) as workspace:
        fill_more(workspace)
    with pytest.raises(UserError, match="holds rows"):
        restore(place, tmp_path / "third", config)
    with pytest.raises(UserError, match="holds rows"):
        restore(place, server, config, replace=True)
    assert not (server / ".posttrain.replaced-1").exists()
    assert_sound(server, config)


@pytest.mark.slow
def test_backups_while_others_write_are_of_one_moment(root: Path, tmp_path: Path) -> None:
    """Every backup holds a prefix of the rows, all artifacts of these rows, and no less feedback than it began with."""
    ended = threading.Event()
    acknowledged: list[int] = []
    inbox_folder = root / ".posttrain" / "inbox"

    def write() -> None:
        with Workspace.open(root) as workspace:
            for number in range(1000):
                if ended.is_set():
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
                if ended.is_set():
                    return
                inbox.append(feedback(number)).result()
                acknowledged.append(number)

    threads = [threading.Thread(target=write), threading.Thread(target=collect)]
    for thread in threads:
        thread.start()
    counts = []
    try:
        for number in range(6):
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
        with new_place(str(tmp_path / "one.tar"), workspace.home) as target:
            report = create_backup(workspace, target)
    assert (report.artifacts, report.damaged) == (3, [])


def damage_artifact(root: Path) -> str:
    """Damages one of the workspace's artifacts; returns its id."""
    file = next(iter(sorted((root / ".posttrain" / "artifacts").glob("model-*/file"))))
    file.chmod(0o644)
    file.write_bytes(b"damaged")
    return file.parent.name


def test_a_killed_backup_can_be_repeated(root: Path, tmp_path: Path) -> None:
    """Killed amid its first artifact, it leaves a folder with nothing but temporary files."""
    left = tmp_path / "backups" / ".tmp" / ("0" * 32)
    left.mkdir(parents=True)
    (left.with_suffix(".lock")).touch()
    (left / "file").write_bytes(b"half")
    assert back_up(root, f"{tmp_path / 'backups'}/").damaged == []
    assert not left.exists()


def test_what_a_killed_backup_to_a_file_left_is_removed(
    root: Path, tmp_path: Path, in_process: Callable[[Callable[[], object]], dict[str, object]]
) -> None:
    places = tmp_path / "places"
    places.mkdir()

    def killed() -> None:
        with new_place(str(places / "one.tar"), root / ".posttrain"):
            os.kill(os.getpid(), signal.SIGKILL)

    assert in_process(killed)["killed"]
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
    with Workspace.open(root) as workspace, open_place(str(tmp_path / "one.tar"), workspace.home) as source:
        segments = dict(inbox_problems(workspace.home / "inbox"))
        restored, missing = restore_damaged(source, list_backups(source), workspace, segments)
        assert (len(restored), missing) == (3, [])
        assert all_rows(workspace).keys() == rows.keys()
        assert len(all_rows(workspace)["runs"]) == len(rows["runs"])
    assert content(root) == before
    assert_sound(root)


@pytest.mark.parametrize(("lost", "fork"), [(1, False), (2, False), (4, False), (4, True), (5, True)])
def test_feedback_of_another_workspace_is_not_restored(root: Path, tmp_path: Path, lost: int, fork: bool) -> None:
    """In a place with backups of two workspaces, whose segments have the same names; the other may be a fork."""
    place = f"{tmp_path / 'backups'}/"
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
    back_up(root, place)
    back_up(other, place)
    with Workspace.open(root) as workspace, open_place(place, workspace.home) as source:
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
    with Workspace.open(root) as workspace, open_place(str(tmp_path / "one.tar"), workspace.home) as source:
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
    for number in range(60):
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
    assert refused > 10
    assert incomplete > 10


def test_a_workspace_is_never_overwritten(root: Path, tmp_path: Path) -> None:
    place = str(tmp_path / "one.tar")
    back_up(root, place)
    before = content(root)
    with pytest.raises(UserError, match="there is a workspace already"):
        restore(place, root)
    assert content(root) == before
    (root / "labels" / "round-1.csv").write_text("newer")
    report = restore(place, root, replace=True)
    assert report.kept == ["labels/round-1.csv"]
    assert (root / "labels" / "round-1.csv").read_text() == "newer"
    assert report.replaced is not None
    assert (report.replaced / "store.db").exists()
    assert_sound(root)


def test_a_workspace_in_use_is_not_replaced(root: Path, tmp_path: Path) -> None:
    place = str(tmp_path / "one.tar")
    back_up(root, place)
    with Workspace.open(root) as workspace, workspace.lock(), pytest.raises(UserError, match="another posttrain works"):
        restore(place, root, replace=True)
    with Inbox(root / ".posttrain" / "inbox"), pytest.raises(UserError, match="collects feedback"):
        restore(place, root, replace=True)
    assert_sound(root)


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("../outside", "files/0"),
        ("/tmp/outside", "files/0"),
        (".posttrain/store.db", "files/0"),
        (".posttrain/../../outside", "files/0"),
        ("inside", "/etc/passwd"),
        ("inside", "../../outside"),
        ("inside", "files/1"),
    ],
)
def test_a_foreign_backup_writes_and_reads_nothing_elsewhere(
    root: Path, tmp_path: Path, name: str, source: str
) -> None:
    with Workspace.open(root) as workspace, new_place(f"{tmp_path / 'backups'}/", workspace.home) as target:
        backup = list_of_one_file(name, source)
        with workspace.artifacts.temporary_folder() as folder:
            (folder / "files").mkdir()
            (folder / "files" / "0").write_text("x")
            target.add_copy(folder, workspace.artifacts.seal(folder, "backup", backup))
    with pytest.raises(UserError, match="holds no backup"):
        restore(str(tmp_path / "backups"), tmp_path / "new")


def list_of_one_file(name: str, source: str) -> dict[str, object]:
    values = {"created_at": "2026-01-01T00:00:00+00:00", "workspace": "w", "version": "0", "rows": 0}
    return {**values, "artifacts": [], "missing": [], "files": {name: source}}


def test_artifacts_of_a_foreign_tar_stay_in_their_folder(tmp_path: Path) -> None:
    from posttrain.store.artifacts import Artifact, FileEntry, parse_manifest

    for name in ("../outside", "/outside", "a/../../outside"):
        with pytest.raises(ValueError, match="outside the artifact"):
            parse_manifest(Artifact("", "model", {}, {name: FileEntry("0" * 64, 1)}).manifest)


@pytest.fixture
def small_files() -> Iterator[Callable[[int], None]]:
    """Returns a function that limits the size of files, as a full disk does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    signal.signal(signal.SIGXFSZ, handler)


def test_a_full_disk_leaves_no_half_backup(root: Path, tmp_path: Path, small_files: Callable[[int], None]) -> None:
    soft = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    for place in (str(tmp_path / "one.tar"), f"{tmp_path / 'backups'}/"):
        small_files(1_000_000)
        with pytest.raises(StorageError):
            back_up(root, place)
        small_files(soft)
        assert not (tmp_path / "one.tar").exists()
        assert not list(tmp_path.glob(".one.tar*"))
    report = back_up(root, f"{tmp_path / 'backups'}/")
    assert report.damaged == []
    restore(str(tmp_path / "backups"), tmp_path / "new")
    assert_sound(tmp_path / "new")


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


STEPS = ["write_atomically", "_restore_files", "_restore_artifacts", "_restore_database", "_link_champion"]


@pytest.mark.parametrize("step", [*STEPS, "Workspace.create", "Path.unlink"])
@pytest.mark.parametrize("late", [False, True])
def test_a_restore_that_is_killed_anywhere_can_be_repeated(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str, late: bool
) -> None:
    """Before or after each step."""
    from posttrain.store import restore as module

    place, new = str(tmp_path / "one.tar"), tmp_path / "new"
    back_up(root, place)
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
            restore(place, new)
    try:
        restore(place, new)
    except UserError:
        assert (new / ".posttrain" / "format.json").exists()  # nothing was left to do
    assert_sound(new)
    with Workspace.open(new) as workspace:
        assert workspace.champion_path.resolve().name == workspace.metadata.deployments()[-1].model_id


def test_only_the_owner_reads_a_backup(root: Path, tmp_path: Path) -> None:
    back_up(root, str(tmp_path / "one.tar"))
    back_up(root, f"{tmp_path / 'backups'}/")
    assert (tmp_path / "one.tar").stat().st_mode & 0o077 == 0
    assert (tmp_path / "backups").stat().st_mode & 0o077 == 0


def test_backups_of_several_workspaces_are_not_confused(root: Path, tmp_path: Path) -> None:
    place = f"{tmp_path / 'backups'}/"
    back_up(root, place)
    with Workspace.create(tmp_path / "second") as workspace:
        fill(workspace)
    second = back_up(tmp_path / "second", place)
    with pytest.raises(UserError, match="several workspaces"):
        restore(place, tmp_path / "new")
    restore(place, tmp_path / "new", id=second.id.removeprefix("backup-")[:8])
    assert not (tmp_path / "new" / "pool.csv").exists()


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
    assert (outcome["value"], outcome["error"]) == (3, None)
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
    assert (outcome["value"], outcome["error"]) == (3, None)
    assert (open_folder / "share").stat().st_mode & 0o777 == 0o777


def test_what_is_no_backup_is_named(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("text" * 1000)
    (tmp_path / "empty").mkdir()
    for name in ("text", "empty", "missing"):
        with pytest.raises(UserError, match="backup"):
            restore(str(tmp_path / name), tmp_path / "new")
    with pytest.raises(UserError, match="something else"), new_place(str(tmp_path), tmp_path):
        pass
