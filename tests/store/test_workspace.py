import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from faults import Outcome, in_process
from posttrain.store.config import StoreConfig, expand_variables
from posttrain.store.errors import DamagedArtifactError, LockedError, StorageError, UserError
from posttrain.store.workspace import FORMAT, Workspace


def commit(workspace: Workspace, content: bytes = b"1", kind: str = "model") -> str:
    with workspace.artifacts.temporary_folder() as folder:
        (folder / "file").write_bytes(content)
        artifact = workspace.artifacts.commit(folder, kind, {})
    workspace.metadata.add_artifact(artifact)
    return artifact.id


def test_create_and_open(tmp_path: Path) -> None:
    with Workspace.create(tmp_path / "deep" / "er") as workspace:
        id = commit(workspace)
    with Workspace.create(tmp_path / "deep" / "er") as reopened:
        assert reopened.artifacts.ids() == [id]
    for write in (True, False):
        with Workspace.open(tmp_path / "deep" / "er", write=write) as opened_workspace:
            assert opened_workspace.home == tmp_path / "deep" / "er" / ".posttrain"
            assert [row.id for row in opened_workspace.metadata.artifacts()] == [id]
            assert opened_workspace.artifacts.path(id).joinpath("file").read_bytes() == b"1"


def create_and_raise(
    root: Path, error: BaseException, config: StoreConfig | None = None, *, commits: bool = False
) -> None:
    def work() -> None:
        with Workspace.create(root, config or StoreConfig()) as workspace, workspace.lock():
            if commits:
                commit(workspace)
            raise error

    with pytest.raises(type(error)):
        work()


def test_a_user_error_leaves_no_new_workspace(tmp_path: Path) -> None:
    create_and_raise(tmp_path / "deep" / "er", UserError("a mistake"))
    assert list(tmp_path.iterdir()) == []
    create_and_raise(tmp_path, UserError("no database"), StoreConfig(database="mysql://here/there"))
    assert list(tmp_path.iterdir()) == []


def test_a_user_error_removes_no_existing_files(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    create_and_raise(tmp_path, UserError("a mistake"))
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    create_and_raise(tmp_path, UserError("a mistake"), commits=True)
    create_and_raise(tmp_path, UserError("another"))
    with Workspace.open(tmp_path) as workspace:
        assert len(workspace.artifacts.ids()) == 1


@pytest.mark.parametrize(
    "error", [StorageError("no space left"), KeyboardInterrupt(), ValueError("a defect")], ids=repr
)
def test_other_errors_leave_the_workspace(tmp_path: Path, error: BaseException) -> None:
    create_and_raise(tmp_path, error)
    with Workspace.open(tmp_path) as workspace:
        assert workspace.artifacts.ids() == []


def test_relative_root_does_not_follow_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with Workspace.create(Path("here")) as workspace:
        monkeypatch.chdir("/")
        assert commit(workspace) in workspace.artifacts.ids()
        assert workspace.root == tmp_path / "here"


def test_opening_a_missing_workspace_raises(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no workspace here; posttrain init"):
        Workspace.open(tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("content", ["", "{}", "[]", "nonsense"])
def test_a_damaged_format_raises(workspace: Workspace, content: str) -> None:
    (workspace.home / "format.json").write_text(content)
    with pytest.raises(UserError, match=r"format\.json: damaged"):
        Workspace.open(workspace.root)


@pytest.mark.parametrize("format", [FORMAT + 1, 99, "2.0"])
def test_a_newer_format_raises(workspace: Workspace, format: object) -> None:
    (workspace.home / "format.json").write_text(json.dumps({"format": format}))
    for enter in (Workspace.open, Workspace.create):
        with pytest.raises(UserError, match=r"newer version of posttrain.*install that version"):
            enter(workspace.root)


def test_folders_are_their_owners_alone(tmp_path: Path) -> None:
    Workspace.create(tmp_path).close()
    home = tmp_path / ".posttrain"
    for folder in (home, home / "artifacts", home / "scratch", home / "tmp"):
        assert folder.stat().st_mode & 0o777 == 0o700
    # Who opens it to others keeps it open.
    home.chmod(0o750)
    Workspace.create(tmp_path).close()
    assert home.stat().st_mode & 0o777 == 0o750


def test_a_copy_that_followed_links_goes_on(workspace: Workspace, tmp_path: Path) -> None:
    ids = [commit(workspace, b"1"), commit(workspace, b"2")]
    workspace.link_champion(ids[0])
    workspace.close()
    subprocess.run(["cp", "-rL", workspace.root, tmp_path / "copy"], check=True)
    with Workspace.create(tmp_path / "copy") as copy, copy.lock():
        assert not copy.champion_path.is_symlink()
        copy.link_champion(ids[1])
        assert copy.champion_path.is_symlink()
        assert (copy.champion_path / "file").read_bytes() == b"2"
        copy.artifacts.delete(ids[0])
        assert copy.artifacts.ids() == [ids[1]]
        assert list((copy.home / "tmp").iterdir()) == []


def test_opening_imports_no_migration_tool(workspace: Workspace) -> None:
    code = (
        "import sys; from pathlib import Path; from posttrain.store.workspace import Workspace\n"
        f"Workspace.open(Path({str(workspace.root)!r})).metadata.runs()\n"
        "print(*sys.modules)"
    )
    modules = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split()
    assert "sqlalchemy" in modules
    assert not {"alembic", "fsspec", "torch", "transformers"} & set(modules)


def test_the_lock_names_its_holder(workspace: Workspace) -> None:
    def enter() -> None:
        with Workspace.open(workspace.root) as other, other.lock():
            pass

    with workspace.lock():
        outcome = in_process(enter)
        assert outcome.error.startswith("LockedError: ")
        note = json.loads((workspace.home / "lock.json").read_text())
        assert note["pid"] == os.getpid()
        for word in (f"process {os.getpid()} on {note['host']} since {note['since']}", str(workspace.root)):
            assert word in outcome.error
        with pytest.raises(UserError, match="another posttrain"), workspace.lock():
            pass
    assert in_process(enter).error is None
    with workspace.lock():
        pass


def test_a_kill_leaves_no_lock(workspace: Workspace) -> None:
    def die() -> None:
        with Workspace.open(workspace.root) as other, other.lock():
            other.metadata.start_run("train", "key")
            with other.artifacts.temporary_folder() as folder:
                (folder / "half").write_bytes(b"x")
                scratch = other.scratch / "key"
                scratch.mkdir()
                (scratch / "state").write_bytes(b"x")
                os.kill(os.getpid(), signal.SIGKILL)

    assert in_process(die).killed
    assert list((workspace.home / "tmp").iterdir()) != []
    with workspace.lock():
        assert list((workspace.home / "tmp").iterdir()) == []
        assert [(run.status, run.error) for run in workspace.metadata.runs()] == [("failed", "interrupted")]
        assert (workspace.scratch / "key" / "state").exists()


def test_many_processes_work_and_one_excludes_them(workspace: Workspace) -> None:
    def work() -> int:
        with Workspace.open(workspace.root) as other, other.work():
            other.metadata.fail_run(other.metadata.start_run("score", "key", worker=other.worker).id, "boom")
            return len(list((other.home / "workers").glob("*.lock")))

    def lock() -> None:
        with Workspace.open(workspace.root) as other, other.lock():
            pass

    with workspace.work(), workspace.for_arm("random").work():  # one worker
        run = workspace.metadata.start_run("train", "long", worker=workspace.worker)
        assert in_process(work).value == 2
        assert f"LockedError: {workspace.root}: another posttrain works in this workspace (process {os.getpid()}" in (
            in_process(lock).error or ""
        )
        assert workspace.metadata.run(run.id) == run  # nobody took it for interrupted
    assert workspace.worker is None
    assert in_process(lock).error is None
    with workspace.lock():
        assert "LockedError" in (in_process(work).error or "")
        assert [run.status for run in workspace.metadata.runs()] == ["failed", "failed"]


def test_a_killed_worker_is_told_from_a_living_one(workspace: Workspace) -> None:
    def die() -> None:
        with Workspace.open(workspace.root) as other, other.work():
            other.metadata.start_run("train", "dead", worker=other.worker)
            os.kill(os.getpid(), signal.SIGKILL)

    with workspace.work():
        living = workspace.metadata.start_run("train", "living", worker=workspace.worker)
        assert in_process(die).killed
        with Workspace.open(workspace.root) as other, other.work():
            (dead,) = [run for run in other.metadata.runs() if run.key == "dead"]
            assert (dead.status, dead.error) == ("failed", "interrupted")
            assert other.metadata.run(living.id) == living


def test_one_process_holds_a_part(workspace: Workspace) -> None:
    def hold(name: str) -> None:
        with Workspace.open(workspace.root) as other, other.hold(name, "another posttrain builds it"):
            pass

    with workspace.hold("dataset-a", "another posttrain builds it"):
        assert "another posttrain builds it (process" in (in_process(lambda: hold("dataset-a")).error or "")
        assert in_process(lambda: hold("dataset-b")).error is None
    assert in_process(lambda: hold("dataset-a")).error is None


def test_scratch_of_finished_work_is_removed(workspace: Workspace) -> None:
    """The next lock removes that of finished runs and rounds: a process was killed between its commit and the removal.

    A failed run can resume while its round is open.
    """
    metadata = workspace.metadata
    for number, status in ((1, "done"), (2, "open")):
        metadata.open_round(number, None)
        metadata.update_round(number, status=status)
    metadata.finish_run(metadata.start_run("train", "done").id)
    for key, round, arm in (("failed", None, ""), ("old", 1, ""), ("resumable", 2, ""), ("other", 1, "random")):
        metadata.for_arm(arm).fail_run(metadata.for_arm(arm).start_run("train", key, round=round).id, "boom")
    for key in ("done", "failed", "old", "resumable", "other"):
        (workspace.scratch / key).mkdir()
        (workspace.scratch / key / "state").write_bytes(b"x")
    with workspace.lock():
        assert sorted(path.name for path in workspace.scratch.iterdir()) == ["failed", "other", "resumable"]


def test_children_of_a_killed_process_do_not_keep_the_lock(workspace: Workspace) -> None:
    """A data loader's workers may outlive the process that forked them."""
    pid_file = workspace.root / "worker"

    def die() -> None:
        with Workspace.open(workspace.root) as other, other.lock():
            worker = os.fork()
            if worker == 0:
                time.sleep(60)
                os._exit(0)
            pid_file.write_text(str(worker))
            os.kill(os.getpid(), signal.SIGKILL)

    outcomes: list[dict[str, Any]] = []
    waiter = threading.Thread(target=lambda: outcomes.append(in_process(die)))
    waiter.start()
    while not pid_file.exists() or not pid_file.read_text():
        time.sleep(0.01)
    worker = int(pid_file.read_text())
    try:
        deadline = time.monotonic() + 20
        while True:
            try:
                with workspace.lock():
                    os.kill(worker, 0)  # the worker still runs
                break
            except LockedError:  # the process has not died yet
                assert time.monotonic() < deadline
                time.sleep(0.05)
    finally:
        os.kill(worker, signal.SIGKILL)
        waiter.join()
    assert outcomes[0].killed


def test_cleanup_keeps_folders_of_running_processes(workspace: Workspace) -> None:
    def tidy() -> None:
        with Workspace.open(workspace.root) as other, other.lock():
            pass

    with workspace.artifacts.temporary_folder() as folder:
        (folder / "file").write_bytes(b"1")
        assert in_process(tidy).error is None
        artifact = workspace.artifacts.commit(folder, "model", {})
    assert workspace.artifacts.verify(artifact.id) == []
    assert list((workspace.home / "tmp").iterdir()) == []


def test_cleanup_removes_folders_whose_lock_a_power_cut_took(workspace: Workspace) -> None:
    left = workspace.home / "tmp" / ("0" * 32)
    left.mkdir()
    (left / "file").write_bytes(b"1")
    with workspace.lock():
        assert list((workspace.home / "tmp").iterdir()) == []


def test_the_champion_has_one_stable_path(workspace: Workspace, tmp_path: Path) -> None:
    assert not workspace.champion_path.exists()
    first_id, second_id = commit(workspace, b"1"), commit(workspace, b"2")
    for id, content in ((first_id, b"1"), (second_id, b"2"), (second_id, b"2"), (first_id, b"1")):
        workspace.link_champion(id)
        assert (workspace.champion_path / "file").read_bytes() == content
    with pytest.raises(DamagedArtifactError):
        workspace.link_champion("model-0123456789abcdef")
    assert (workspace.champion_path / "file").read_bytes() == b"1"
    workspace.close()
    shutil.move(workspace.root, tmp_path / "moved")
    assert (tmp_path / "moved" / ".posttrain" / "champion" / "file").read_bytes() == b"1"


def test_the_champion_path_always_exists(workspace: Workspace) -> None:
    ids = [commit(workspace, b"1"), commit(workspace, b"2")]
    workspace.link_champion(ids[0])

    def swap() -> None:
        with Workspace.open(workspace.root) as other:
            for number in range(100):
                other.link_champion(ids[number % 2])

    swapper = threading.Thread(target=lambda: in_process(swap))
    swapper.start()
    reads = 0
    while swapper.is_alive():
        assert (workspace.champion_path / "file").read_bytes() in (b"1", b"2")
        reads += 1
    assert reads > 10


def test_a_read_only_folder(open_folder: Path, unprivileged: Callable[..., Outcome]) -> None:
    """Readers work there, even with the log of a killed process; writers raise a clear error."""
    root = open_folder / "workspace"
    workspace = Workspace.create(root)
    id = commit(workspace)  # still in the log, as the database is open
    for path in (root, *root.rglob("*")):
        path.chmod(0o555 if path.is_dir() else 0o444)
    modification_times = {path: path.stat().st_mtime_ns for path in root.rglob("*")}

    def read_workspace() -> Any:
        with Workspace.open(root, write=False) as reader:
            assert reader.artifacts.path(id).joinpath("file").read_bytes() == b"1"
            return [row.id for row in reader.metadata.artifacts()]

    assert unprivileged(read_workspace) == Outcome(killed=False, value=[id])
    for enter in (Workspace.open, Workspace.create):
        outcome = unprivileged(lambda enter=enter: enter(root).close())  # type: ignore[misc]
        assert outcome.error.startswith("UserError: ")
        assert "read-only workspace" in outcome.error
    assert {path: path.stat().st_mtime_ns for path in root.rglob("*")} == modification_times
    workspace.close()


def test_create_without_permission_raises(open_folder: Path, unprivileged: Callable[..., Outcome]) -> None:
    error = unprivileged(lambda: Workspace.create(open_folder / "new").close()).error
    assert error.startswith(f"StorageError: {open_folder / 'new'}")
    assert "permission denied" in error
    assert list(open_folder.iterdir()) == []


@pytest.mark.slow
def test_postgres_and_s3_by_url(
    tmp_path: Path, postgres_url: str, s3_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TEST_DATABASE", postgres_url)
    config = StoreConfig(database="${TEST_DATABASE}", artifacts=s3_url)
    held = f"held by process {os.getpid()}"
    # The other workspace is as on another host: its folder has no lock file of the first one.
    with Workspace.create(tmp_path, config) as workspace, Workspace.create(tmp_path / "other", config) as other:
        with workspace.lock():
            id = commit(workspace)
            workspace.link_champion(id)
            for locks in (other.lock, other.work):
                with pytest.raises(UserError, match=held), locks():
                    pass
            assert other.artifacts.path(other.metadata.resolve("model")).joinpath("file").read_bytes() == b"1"
        with workspace.work(), workspace.hold("loop", "busy"):
            run = workspace.metadata.start_run("train", "key", worker=workspace.worker)
            with other.work():
                assert other.metadata.run(run.id) == run
            with pytest.raises(UserError, match=held), other.hold("loop", "busy"):
                pass
        with other.lock():
            assert [run.status for run in other.metadata.runs()] == ["failed"]
    with Workspace.open(tmp_path, config, write=False) as workspace:
        assert workspace.metadata.artifact(id) is not None
        assert (workspace.champion_path / "file").read_bytes() == b"1"
    assert not (tmp_path / ".posttrain" / "store.db").exists()
    assert "password" not in StoreConfig().model_dump_json()


def test_variables_in_urls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEST_USER", "a${TEST_HOST}")
    monkeypatch.setenv("TEST_HOST", "host")
    assert expand_variables("x://${TEST_USER}@${TEST_HOST}/$HOME", "k") == "x://a${TEST_HOST}@host/$HOME"
    monkeypatch.delenv("TEST_HOST")
    with pytest.raises(UserError, match=r"store\.database: environment variable `TEST_HOST` is not set"):
        expand_variables("${TEST_HOST}", "store.database")
