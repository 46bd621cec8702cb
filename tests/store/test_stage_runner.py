"""A stage runs once, whatever happens: errors, damage, several processes at once."""

import hashlib
import logging
import os
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from stages import fill, run

from faults import start
from posttrain.store import stage_runner
from posttrain.store.errors import StorageError, UserError, Waiting, is_user_mistake
from posttrain.store.progress import progress_bar
from posttrain.store.stage_runner import PARTS, Work, stage_key
from posttrain.store.workspace import Workspace


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


@pytest.mark.slow
def test_concurrent_runs_give_the_same_artifact(workspace: Workspace) -> None:
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
    outcomes = [process.wait() for process in processes]
    assert {(outcome.error, outcome.value) for outcome in outcomes} == {(None, outcomes[0].value)}
    with Workspace.open(workspace.root) as other:
        assert other.artifacts.ids() == [outcomes[0].value]
        assert other.artifacts.verify(outcomes[0].value) == []
        assert list((other.home / "tmp").iterdir()) == []


def test_work_that_ends_while_its_artifact_is_looked_for_is_not_repeated(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = []

    def find_none(other: Workspace, stage: str, key: str) -> None:
        if not looks:
            looks.append(key)
            run(other)

    monkeypatch.setattr(stage_runner, "_find_sealed", find_none)
    assert run(workspace, fail_if_called).kind
    assert [item.status for item in workspace.metadata.runs()] == ["done"]


def test_equal_work_is_done_once(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second process waits for the first, and does the work itself where that one fails or is killed."""
    folder = workspace.root

    def work_until(ends: Callable[[], None]) -> Work:
        def work(out: Path, scratch: Path) -> Mapping[str, Any]:
            with (folder / "begun").open("a") as log:
                log.write("x")
            while not (folder / "go").exists():
                time.sleep(0.01)
            ends()
            return fill(out, scratch)

        return work

    def poll(seconds: float) -> None:
        (folder / "waits").touch()
        time.sleep(seconds)

    monkeypatch.setattr(stage_runner, "time", SimpleNamespace(sleep=poll, monotonic=time.monotonic))

    def stage(ends: Callable[[], None], config: dict[str, Any]) -> str:
        with Workspace.open(folder) as other, other.work():
            return str(run(other, work_until(ends), config=config).id)

    def fail() -> None:
        raise RuntimeError("boom")

    def die() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    workspace.close()
    for number, (ends, expected) in enumerate(((lambda: None, 1), (fail, 2), (die, 2))):
        for name in ("begun", "go", "waits"):
            (folder / name).unlink(missing_ok=True)
        config = {"number": number}
        first = start(lambda ends=ends, config=config: stage(ends, config))
        while not (folder / "begun").exists():
            time.sleep(0.01)
        second = start(lambda config=config: stage(lambda: None, config))
        # Until it waits: a process that is slow to begin would find the finished work.
        while not (folder / "waits").exists() and (folder / "begun").read_text() == "x":
            time.sleep(0.01)
        (folder / "go").touch()
        outcomes = [first.wait(), second.wait()]
        assert outcomes[1].error is None
        assert (outcomes[0].value == outcomes[1].value) is (expected == 1)
        assert len((folder / "begun").read_text()) == expected


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
