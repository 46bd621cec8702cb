"""A stage runs once, whatever happens: kills, a full disk, damage, several processes at once."""

import errno
import hashlib
import logging
import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import event

from posttrain.store.errors import StorageError, UserError, Waiting, is_user_mistake
from posttrain.store.journal import Journal
from posttrain.store.progress import progress_bar
from posttrain.store.stage_runner import PARTS, run_stage, stage_key
from posttrain.store.verify import verify_database
from posttrain.store.workspace import JOURNAL, Workspace

InProcess = Callable[[Callable[[], Any]], dict[str, Any]]
Start = Callable[[Callable[[], Any]], Callable[[], dict[str, Any]]]


def fill(out: Path, scratch: Path) -> Mapping[str, Any]:
    (out / "inner").mkdir()
    (out / "a.txt").write_text("a")
    (out / "inner" / "b.txt").write_text("b")
    return {"n": 2}


def run(workspace: Workspace, work: Callable[[Path, Path], Mapping[str, Any]] = fill, **changes: Any) -> Any:
    defaults = {"kind": "dataset", "inputs": {}, "config": {"x": 1}, "seed": 0, "round": 0, "work": work}
    return run_stage(workspace, "collect", 1, **{**defaults, **changes})


def fail_if_called(out: Path, scratch: Path) -> Mapping[str, Any]:
    pytest.fail("finished work was done again")


def test_a_stage_runs_once(workspace: Workspace) -> None:
    artifact = run(workspace)
    assert run(workspace, fail_if_called, round=5) == artifact
    with Workspace.open(workspace.root) as other:
        assert run(other, fail_if_called) == artifact
    (record,) = workspace.metadata.runs()
    assert (record.status, record.output, record.round, record.config) == ("done", artifact.id, 0, {"x": 1})
    assert record.seconds is not None
    assert 0 <= record.seconds < 60
    row = workspace.metadata.artifact(artifact.id)
    assert row is not None
    assert (row.size, row.files, row.meta) == (2, 2, {"n": 2})
    assert list((workspace.home / "scratch").iterdir()) == []


def test_a_run_records_the_tasks_of_its_own_work(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    def work(out: Path, scratch: Path) -> Mapping[str, Any]:
        with progress_bar("inside", 1):
            return fill(out, scratch)

    def interrupt(*arguments: object, **options: object) -> None:
        raise KeyboardInterrupt

    with progress_bar("before", 1):
        pass
    run(workspace, work)
    with monkeypatch.context() as patch:
        # As a kill between publishing and recording; the next run takes over what was published.
        patch.setattr(workspace.metadata, "finish_run", interrupt)
        with pytest.raises(KeyboardInterrupt):
            run(workspace, work, seed=1)
    with progress_bar("between", 1):
        pass
    run(workspace, fail_if_called, seed=1)
    first, second = workspace.metadata.runs()
    assert (list(first.detail["tasks"]), second.detail["tasks"]) == (["inside"], {})


def test_the_key_depends_on_every_argument() -> None:
    arguments: Any = ("s", 1, {"a": "1", "b": "2"}, {"x": [1, {"y": None}]}, 0)
    key = stage_key(*arguments)
    assert key == stage_key("s", 1, {"b": "2", "a": "1"}, {"x": [1, {"y": None}]}, 0)
    changes: list[Any] = [
        ("t", 0),
        (2, 1),
        ({"a": "2", "b": "1"}, 2),
        ({"a": "1"}, 2),
        ({"x": [1, {"y": 0}]}, 3),
        (1, 4),
    ]
    other_keys = [stage_key(*(*arguments[:index], value, *arguments[index + 1 :])) for value, index in changes]
    assert len({key, *other_keys}) == 7
    text = b'{"config":{"x":[1,{"y":null}]},"inputs":{"a":"1","b":"2"},"seed":0,"stage":"s","version":1}'
    assert key == hashlib.sha256(text).hexdigest()


def test_a_failed_stage_resumes_from_its_scratch(workspace: Workspace) -> None:
    def fail(out: Path, scratch: Path) -> Mapping[str, Any]:
        (scratch / "state").write_text("half")
        (out / "junk").write_text("half")
        raise ZeroDivisionError("boom")

    def resume(out: Path, scratch: Path) -> Mapping[str, Any]:
        assert (scratch / "state").read_text() == "half"
        assert list(out.iterdir()) == []
        return fill(out, scratch)

    with pytest.raises(ZeroDivisionError):
        run(workspace, fail)
    assert workspace.artifacts.ids() == []
    assert run(workspace, resume).files.keys() == {"a.txt", "inner/b.txt"}
    runs = [(item.status, item.error) for item in workspace.metadata.runs()]
    assert runs == [("failed", "ZeroDivisionError: boom"), ("done", None)]
    assert list((workspace.home / "scratch").iterdir()) == list((workspace.home / "tmp").iterdir()) == []


@pytest.mark.parametrize(
    "error", [UserError("a mistake"), StorageError("no space left"), KeyboardInterrupt()], ids=repr
)
def test_scratch_is_removed_only_after_a_user_error(workspace: Workspace, error: BaseException) -> None:
    def fail(out: Path, scratch: Path) -> Mapping[str, Any]:
        (scratch / "state").write_text("half")
        raise error

    with pytest.raises(type(error)):
        run(workspace, fail)
    scratch_folders = list((workspace.home / "scratch").iterdir())
    assert bool(scratch_folders) is not is_user_mistake(error)
    (failed_run,) = workspace.metadata.runs()
    assert failed_run.status == "failed"


def test_a_waiting_stage_keeps_its_scratch(workspace: Workspace) -> None:
    def wait(out: Path, scratch: Path) -> Mapping[str, Any]:
        (scratch / "batch").write_text("asked")
        raise Waiting("labels for round 2")

    for _ in range(2):
        with pytest.raises(Waiting):
            run(workspace, wait)
    assert [(item.status, item.error) for item in workspace.metadata.runs()] == [("waiting", "labels for round 2")] * 2
    assert (workspace.scratch / workspace.metadata.runs()[0].key / "batch").exists()
    assert run(workspace).kind == "dataset"


@pytest.mark.parametrize("damage", ["flip", "remove a file", "remove the manifest", "remove all"])
def test_damaged_output_is_built_again(
    workspace: Workspace, caplog: pytest.LogCaptureFixture, damage: str, tmp_path: Path
) -> None:
    artifact = run(workspace)
    folder = workspace.artifacts.path(artifact.id)
    if damage == "flip":
        (folder / "inner" / "b.txt").write_text("c")
    elif damage == "remove all":
        workspace.artifacts.delete(artifact.id)
    else:
        (folder / {"remove a file": "inner/b.txt", "remove the manifest": "manifest.json"}[damage]).unlink()
    workspace.close()
    with Workspace.open(workspace.root) as other, caplog.at_level(logging.WARNING, logger="posttrain"):
        assert run(other) == artifact
        assert artifact.id in caplog.text
        assert "doing the work again" in caplog.text
        assert (damage in ("remove all", "remove the manifest")) or "inner/b.txt" in caplog.text
        assert other.artifacts.verify(artifact.id) == []
        assert run(other, fail_if_called) == artifact
        assert [item.status for item in other.metadata.runs()] == ["done", "done"]


def test_concurrent_runs_give_the_same_artifact(workspace: Workspace, start: Start) -> None:
    """Processes that do the same stage at the same time, without a lock, agree."""
    reader, writer = os.pipe()

    def wait_and_fill(out: Path, scratch: Path) -> Mapping[str, Any]:
        os.read(reader, 1)
        return fill(out, scratch)

    def work() -> str:
        with Workspace.open(workspace.root) as other:
            return str(run(other, wait_and_fill).id)

    workspace.close()
    processes = [start(work) for _ in range(4)]
    os.write(writer, b"start")
    outcomes = [wait() for wait in processes]
    assert {(outcome["error"], outcome["value"]) for outcome in outcomes} == {(None, outcomes[0]["value"])}
    with Workspace.open(workspace.root) as other:
        assert other.artifacts.ids() == [outcomes[0]["value"]]
        assert other.artifacts.verify(outcomes[0]["value"]) == []
        assert list((other.home / "tmp").iterdir()) == []


# The calls that change the disk; removals succeed even on a full one.
NEEDS_SPACE = ("mkdir", "rename", "replace", "fsync")
REMOVALS = ("unlink", "rmdir")


@contextmanager
def before_each(calls: tuple[str, ...], act: Callable[[], None]) -> Iterator[None]:
    """Call ``act`` before every one of these calls of the operating system."""

    def wrap(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            act()
            return function(*arguments, **options)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in calls:
            patch.setattr(os, name, wrap(getattr(os, name)))
        yield


def test_scratch_of_a_finished_round_is_removed(workspace: Workspace) -> None:
    def interrupt(out: Path, scratch: Path) -> Mapping[str, Any]:
        (scratch / "checkpoint").write_text("half")
        raise KeyboardInterrupt

    for round, config in ((1, {"epochs": 1}), (2, {"epochs": 2})):
        workspace.metadata.open_round(round, None)
        with pytest.raises(KeyboardInterrupt):
            run(workspace, interrupt, config=config, round=round)
    workspace.metadata.update_round(1, status="done")
    first_key, second_key = (run.key for run in workspace.metadata.runs())
    with workspace.lock():
        assert [folder.name for folder in (workspace.home / "scratch").iterdir()] == [second_key] != [first_key]


@pytest.fixture
def memory_folder(tmp_path: Path) -> Iterator[Path]:
    """A folder in memory, if the system has one."""
    parent = Path("/dev/shm")
    folder = Path(tempfile.mkdtemp(dir=parent if parent.is_dir() else tmp_path))
    yield folder
    shutil.rmtree(folder)


def two_stages(workspace: Workspace, log: Path) -> str:
    """A stage that resumes from its scratch, and one that takes its output; ``log`` records what they do."""

    def note(line: str) -> None:
        with log.open("a") as file:
            file.write(f"{line}\n")

    def first(out: Path, scratch: Path) -> Mapping[str, Any]:
        for step in range(3):
            if not (scratch / str(step)).exists():
                note(f"step {step}")
                os.mkdir(scratch / str(step))
        return fill(out, scratch)

    def second(out: Path, scratch: Path) -> Mapping[str, Any]:
        # Random, so that a second build of a published artifact would differ.
        (out / "model").write_bytes(os.urandom(8))
        note("second")
        return {}

    data = run(workspace, first)
    model = run(workspace, second, kind="model", inputs={"data": data.id}, config={})
    return str(model.id)


@pytest.mark.slow
def test_a_kill_before_every_call(memory_folder: Path, in_process: InProcess) -> None:
    """Kills a process before each of its calls in turn; the same command then always gives the same result."""
    ends: set[tuple[int, int]] = set()
    Workspace.create(memory_folder / "new").close()
    for instant in range(1000):
        root, log = memory_folder / str(instant), memory_folder / f"{instant}.log"
        shutil.copytree(memory_folder / "new", root)

        def work(instant: int = instant, root: Path = root, log: Path = log) -> str:
            remaining = iter(range(instant))
            with Workspace.open(root) as workspace, workspace.lock():

                def act() -> None:
                    if next(remaining, None) is None:
                        os.kill(os.getpid(), signal.SIGKILL)

                engine = workspace.metadata.engine
                event.listen(engine, "before_cursor_execute", lambda *args: act())
                event.listen(engine, "commit", lambda *args: act())
                with before_each(NEEDS_SPACE + REMOVALS, act):
                    return two_stages(workspace, log)

        outcome = in_process(work)
        assert outcome["error"] is None

        def rerun(root: Path = root, log: Path = log) -> list[Any]:
            with Workspace.open(root, write=False) as reader:
                artifact_ids = reader.artifacts.ids()
                assert not any(reader.artifacts.verify(id) for id in artifact_ids)
                assert {row.id for row in reader.metadata.artifacts()} <= set(artifact_ids)
                # No kill looks like damage.
                assert verify_database(reader.metadata, Journal(reader.home / JOURNAL)) == []
            with Workspace.open(root) as workspace, workspace.lock():
                id = two_stages(workspace, log)
                assert list((workspace.home / "tmp").iterdir()) == []
                assert list((workspace.home / "scratch").iterdir()) == []
                runs = workspace.metadata.runs()
                assert sorted(run.stage for run in runs if run.status == "done") == ["collect"] * 2
                assert {run.status for run in runs} <= {"done", "failed"}
                return [id, workspace.artifacts.ids(), [row.id for row in workspace.metadata.artifacts()]]

        result = in_process(rerun)
        assert result["error"] is None
        id, artifact_ids, rows = result["value"]
        assert id in artifact_ids
        assert set(rows) <= set(artifact_ids)
        assert outcome["killed"] or outcome["value"] == id
        notes = log.read_text().split("\n")
        assert [notes.count(f"step {step}") for step in range(3)] in (
            [1, 1, 1],
            [2, 1, 1],
            [1, 2, 1],
            [1, 1, 2],
        )
        ends.add((notes.count("second"), len(artifact_ids)))
        shutil.rmtree(root)
        if not outcome["killed"]:
            break
    assert instant > 60  # the kills covered all phases of both commits
    # However often the second stage started, it published one model.
    assert ends == {(1, 2), (2, 2)}


@pytest.mark.slow
def test_a_full_disk_at_every_call(memory_folder: Path) -> None:
    """Each call in turn fails with a full disk: the error is one clear line, and nothing is half-written."""
    Workspace.create(memory_folder / "new").close()
    for instant in range(1000):
        root, log = memory_folder / str(instant), memory_folder / f"{instant}.log"
        shutil.copytree(memory_folder / "new", root)
        remaining = iter(range(instant))
        failures: list[bool] = []

        def act(remaining: Iterator[int] = remaining, failures: list[bool] = failures) -> None:
            if next(remaining, None) is None and not failures:
                failures.append(True)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        with Workspace.open(root) as workspace, workspace.lock():
            error = None
            with before_each(NEEDS_SPACE, act):
                try:
                    two_stages(workspace, log)
                except (UserError, OSError) as exception:
                    error = exception
            if not failures:
                break
            if error is not None:
                assert isinstance(error, UserError), instant
                assert "no space left on device" in str(error)
        with Workspace.open(root) as workspace, workspace.lock():
            assert not any(workspace.artifacts.verify(id) for id in workspace.artifacts.ids())
            two_stages(workspace, log)
            assert {run.status for run in workspace.metadata.runs()} <= {"done", "failed"}
        shutil.rmtree(root)
    assert instant > 20


def test_a_file_size_limit_raises(workspace: Workspace, in_process: InProcess) -> None:
    """The kernel itself refuses a write."""
    import resource

    def work() -> None:
        with Workspace.open(workspace.root) as other:

            def large(out: Path, scratch: Path) -> Mapping[str, Any]:
                resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
                (out / "large").write_bytes(bytes(2 << 20))
                return {}

            run(other, large)

    assert "StorageError: " in (error := in_process(work)["error"])
    assert "file too large" in error
    assert workspace.artifacts.ids() == []
    assert run(workspace).kind == "dataset"


def test_a_full_disk_in_native_code_is_a_user_error(workspace: Workspace) -> None:
    def work(out: Path, scratch: Path) -> Mapping[str, Any]:
        raise RuntimeError("PytorchStreamWriter failed: No space left on device (os error 28)")

    with pytest.raises(UserError, match="no space left on device"):
        run(workspace, work)


@pytest.mark.parametrize("damage", ["flip", "remove"])
def test_a_damaged_part_is_built_again(workspace: Workspace, damage: str) -> None:
    def work(out: Path, scratch: Path) -> Mapping[str, Any]:
        with workspace_of_work[-1].artifacts.temporary_folder() as folder:
            (folder / "part.txt").write_text("part")
            part = workspace_of_work[-1].artifacts.commit(folder, "records", {})
        (out / "whole.txt").write_text("whole")
        return {PARTS: [part.id]}

    workspace_of_work = [workspace]
    artifact = run(workspace, work)
    (part,) = artifact.meta[PARTS]
    folder = workspace.artifacts.path(part)
    if damage == "flip":
        (folder / "part.txt").write_text("tram")
    else:
        workspace.artifacts.delete(part)
    workspace.close()
    with Workspace.open(workspace.root) as other:
        workspace_of_work.append(other)
        assert run(other, work) == artifact
        assert other.artifacts.verify(part) == []
        assert run(other, fail_if_called) == artifact
