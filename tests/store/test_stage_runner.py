"""A stage is done once, whatever happens: kills, a full disk, damage, several processes at once."""

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
from posttrain.store.stage_runner import PARTS, run_stage, stage_key
from posttrain.store.workspace import Workspace

InProcess = Callable[[Callable[[], Any]], dict[str, Any]]
Start = Callable[[Callable[[], Any]], Callable[[], dict[str, Any]]]


def fill(out: Path, scratch: Path) -> Mapping[str, Any]:
    (out / "inner").mkdir()
    (out / "a.txt").write_text("a")
    (out / "inner" / "b.txt").write_text("b")
    return {"n": 2}


def run(workspace: Workspace, work: Callable[[Path, Path], Mapping[str, Any]] = fill, **changes: Any) -> Any:
    given = {"kind": "dataset", "inputs": {}, "config": {"x": 1}, "seed": 0, "round": 0, "work": work}
    return run_stage(workspace, "collect", 1, **{**given, **changes})


def never(out: Path, scratch: Path) -> Mapping[str, Any]:
    pytest.fail("finished work was done again")


def test_done_once(workspace: Workspace) -> None:
    artifact = run(workspace)
    assert run(workspace, never, round=5) == artifact
    with Workspace.open(workspace.root) as other:
        assert run(other, never) == artifact
    (done,) = workspace.metadata.runs()
    assert (done.status, done.output, done.round, done.config) == ("done", artifact.id, 0, {"x": 1})
    assert done.seconds is not None
    assert 0 <= done.seconds < 60
    row = workspace.metadata.artifact(artifact.id)
    assert row is not None
    assert (row.size, row.files, row.meta) == (2, 2, {"n": 2})
    assert list((workspace.home / "scratch").iterdir()) == []


def test_what_the_key_depends_on() -> None:
    given: Any = ("s", 1, {"a": "1", "b": "2"}, {"x": [1, {"y": None}]}, 0)
    key = stage_key(*given)
    assert key == stage_key("s", 1, {"b": "2", "a": "1"}, {"x": [1, {"y": None}]}, 0)
    others: list[Any] = [
        ("t", 0),
        (2, 1),
        ({"a": "2", "b": "1"}, 2),
        ({"a": "1"}, 2),
        ({"x": [1, {"y": 0}]}, 3),
        (1, 4),
    ]
    changed = [stage_key(*(*given[:place], value, *given[place + 1 :])) for value, place in others]
    assert len({key, *changed}) == 7
    text = b'{"config":{"x":[1,{"y":null}]},"inputs":{"a":"1","b":"2"},"seed":0,"stage":"s","version":1}'
    assert key == hashlib.sha256(text).hexdigest()


def test_failed_work_is_done_again_with_its_scratch(workspace: Workspace) -> None:
    def fail(out: Path, scratch: Path) -> Mapping[str, Any]:
        (scratch / "state").write_text("half")
        (out / "junk").write_text("half")
        raise ZeroDivisionError("boom")

    def go_on(out: Path, scratch: Path) -> Mapping[str, Any]:
        assert (scratch / "state").read_text() == "half"
        assert list(out.iterdir()) == []
        return fill(out, scratch)

    with pytest.raises(ZeroDivisionError):
        run(workspace, fail)
    assert workspace.artifacts.ids() == []
    assert run(workspace, go_on).files.keys() == {"a.txt", "inner/b.txt"}
    runs = [(item.status, item.error) for item in workspace.metadata.runs()]
    assert runs == [("failed", "ZeroDivisionError: boom"), ("done", None)]
    assert list((workspace.home / "scratch").iterdir()) == list((workspace.home / "tmp").iterdir()) == []


@pytest.mark.parametrize(
    "error", [UserError("a mistake"), StorageError("no space left"), KeyboardInterrupt()], ids=repr
)
def test_scratch_goes_after_a_mistake_alone(workspace: Workspace, error: BaseException) -> None:
    def fail(out: Path, scratch: Path) -> Mapping[str, Any]:
        (scratch / "state").write_text("half")
        raise error

    with pytest.raises(type(error)):
        run(workspace, fail)
    left = list((workspace.home / "scratch").iterdir())
    assert bool(left) is not is_user_mistake(error)
    (failed,) = workspace.metadata.runs()
    assert failed.status == "failed"


def test_interrupt_is_recorded(workspace: Workspace) -> None:
    def stop(out: Path, scratch: Path) -> Mapping[str, Any]:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(workspace, stop)
    assert [item.status for item in workspace.metadata.runs()] == ["failed"]


def test_waiting(workspace: Workspace) -> None:
    def wait(out: Path, scratch: Path) -> Mapping[str, Any]:
        (scratch / "batch").write_text("asked")
        raise Waiting("labels for round 2")

    for _ in range(2):
        with pytest.raises(Waiting):
            run(workspace, wait)
    assert [(item.status, item.error) for item in workspace.metadata.runs()] == [("waiting", "labels for round 2")] * 2
    assert workspace.scratch(workspace.metadata.runs()[0].key).joinpath("batch").exists()
    assert run(workspace).kind == "dataset"


@pytest.mark.parametrize("damage", ["flip", "remove a file", "remove the manifest", "remove all"])
def test_damaged_output_is_made_again(
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
        assert run(other, never) == artifact
        assert [item.status for item in other.metadata.runs()] == ["done", "done"]


def test_two_at_once(workspace: Workspace, start: Start) -> None:
    """Processes that do the same stage at the same time, without a lock, agree."""
    reader, writer = os.pipe()

    def together(out: Path, scratch: Path) -> Mapping[str, Any]:
        os.read(reader, 1)
        return fill(out, scratch)

    def work() -> str:
        with Workspace.open(workspace.root) as other:
            return str(run(other, together).id)

    workspace.close()
    processes = [start(work) for _ in range(4)]
    os.write(writer, b"start")
    outcomes = [wait() for wait in processes]
    assert {(outcome["error"], outcome["value"]) for outcome in outcomes} == {(None, outcomes[0]["value"])}
    with Workspace.open(workspace.root) as other:
        assert other.artifacts.ids() == [outcomes[0]["value"]]
        assert other.artifacts.verify(outcomes[0]["value"]) == []
        assert list((other.home / "tmp").iterdir()) == []


# The calls that change the disk; those that only take away can always be served by a full one.
NEEDS_SPACE = ("mkdir", "rename", "replace", "fsync")
TAKES_AWAY = ("unlink", "rmdir")


@contextmanager
def before_each(calls: tuple[str, ...], act: Callable[[], None]) -> Iterator[None]:
    """Call ``act`` before every one of these calls of the operating system."""

    def watched(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            act()
            return function(*arguments, **options)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in calls:
            patch.setattr(os, name, watched(getattr(os, name)))
        yield


def test_scratch_of_a_finished_round_is_removed(workspace: Workspace) -> None:
    def stopped(out: Path, scratch: Path) -> Mapping[str, Any]:
        (scratch / "checkpoint").write_text("half")
        raise KeyboardInterrupt

    for round, config in ((1, {"epochs": 1}), (2, {"epochs": 2})):
        workspace.metadata.open_round(round, None)
        with pytest.raises(KeyboardInterrupt):
            run(workspace, stopped, config=config, round=round)
    workspace.metadata.update_round(1, status="done")
    first, second = (run.key for run in workspace.metadata.runs())
    with workspace.lock():
        assert [folder.name for folder in (workspace.home / "scratch").iterdir()] == [second] != [first]


@pytest.fixture
def memory_folder(tmp_path: Path) -> Iterator[Path]:
    """A folder in memory where there is such a thing."""
    parent = Path("/dev/shm")
    folder = Path(tempfile.mkdtemp(dir=parent if parent.is_dir() else tmp_path))
    yield folder
    shutil.rmtree(folder)


def two_stages(workspace: Workspace, log: Path) -> str:
    """A stage that resumes from its scratch, and one that takes its output; ``log`` tells what they do."""

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
        # Not the same twice: what was published must be found and not made again.
        (out / "model").write_bytes(os.urandom(8))
        note("second")
        return {}

    data = run(workspace, first)
    model = run(workspace, second, kind="model", inputs={"data": data.id}, config={})
    return str(model.id)


@pytest.mark.slow
def test_killed_at_every_instant(memory_folder: Path, in_process: InProcess) -> None:
    """The sweep kills one process before each of its calls; the same command again always ends the same."""
    ends: set[tuple[int, int]] = set()
    Workspace.create(memory_folder / "new").close()
    for instant in range(1000):
        root, log = memory_folder / str(instant), memory_folder / f"{instant}.log"
        shutil.copytree(memory_folder / "new", root)

        def work(instant: int = instant, root: Path = root, log: Path = log) -> str:
            left = iter(range(instant))
            with Workspace.open(root) as workspace, workspace.lock():

                def act() -> None:
                    if next(left, None) is None:
                        os.kill(os.getpid(), signal.SIGKILL)

                engine = workspace.metadata.engine
                event.listen(engine, "before_cursor_execute", lambda *given: act())
                event.listen(engine, "commit", lambda *given: act())
                with before_each(NEEDS_SPACE + TAKES_AWAY, act):
                    return two_stages(workspace, log)

        outcome = in_process(work)
        assert outcome["error"] is None

        def again(root: Path = root, log: Path = log) -> list[Any]:
            with Workspace.open(root, write=False) as reader:
                stored = reader.artifacts.ids()
                assert not any(reader.artifacts.verify(id) for id in stored)
                assert {row.id for row in reader.metadata.artifacts()} <= set(stored)
            with Workspace.open(root) as workspace, workspace.lock():
                id = two_stages(workspace, log)
                assert list((workspace.home / "tmp").iterdir()) == []
                assert list((workspace.home / "scratch").iterdir()) == []
                runs = workspace.metadata.runs()
                assert sorted(run.stage for run in runs if run.status == "done") == ["collect"] * 2
                assert {run.status for run in runs} <= {"done", "failed"}
                return [id, workspace.artifacts.ids(), [row.id for row in workspace.metadata.artifacts()]]

        result = in_process(again)
        assert result["error"] is None
        id, stored, rows = result["value"]
        assert id in stored
        assert set(rows) <= set(stored)
        assert outcome["killed"] or outcome["value"] == id
        notes = log.read_text().split("\n")
        assert [notes.count(f"step {step}") for step in range(3)] in (
            [1, 1, 1],
            [2, 1, 1],
            [1, 2, 1],
            [1, 1, 2],
        )
        ends.add((notes.count("second"), len(stored)))
        shutil.rmtree(root)
        if not outcome["killed"]:
            break
    assert instant > 60  # the sweep went through all phases of both commits
    # However often the second stage had to begin, one model is all that it ever published.
    assert ends == {(1, 2), (2, 2)}


@pytest.mark.slow
def test_full_disk_at_every_instant(memory_folder: Path) -> None:
    """Each call in turn is told that the disk is full: one clear line, nothing half-written."""
    Workspace.create(memory_folder / "new").close()
    for instant in range(1000):
        root, log = memory_folder / str(instant), memory_folder / f"{instant}.log"
        shutil.copytree(memory_folder / "new", root)
        left = iter(range(instant))
        failed: list[bool] = []

        def act(left: Iterator[int] = left, failed: list[bool] = failed) -> None:
            if next(left, None) is None and not failed:
                failed.append(True)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        with Workspace.open(root) as workspace, workspace.lock():
            error = None
            with before_each(NEEDS_SPACE, act):
                try:
                    two_stages(workspace, log)
                except (UserError, OSError) as caught:
                    error = caught
            if not failed:
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


def test_a_limit_of_the_system(workspace: Workspace, in_process: InProcess) -> None:
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


def test_native_writers_say_it_in_words(workspace: Workspace) -> None:
    def work(out: Path, scratch: Path) -> Mapping[str, Any]:
        raise RuntimeError("PytorchStreamWriter failed: No space left on device (os error 28)")

    with pytest.raises(UserError, match="no space left on device"):
        run(workspace, work)


@pytest.mark.parametrize("damage", ["flip", "remove"])
def test_a_damaged_part_is_made_again(workspace: Workspace, damage: str) -> None:
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
        assert run(other, never) == artifact
