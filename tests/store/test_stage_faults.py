"""Kills and full disks at every call of a stage, and what the system refuses, leave nothing half-written."""

import errno
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from stages import fill, run

from faults import NEEDS_SPACE, at_calls, at_transactions, in_process, kill_at
from posttrain.store.errors import UserError
from posttrain.store.journal import Journal
from posttrain.store.verify import verify_database
from posttrain.store.workspace import JOURNAL, Workspace


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
def test_a_kill_at_any_call(memory_folder: Path) -> None:
    """Kills a process before every sixth of its calls in turn; the same command then always gives the same result."""
    ends: set[tuple[int, int]] = set()
    Workspace.create(memory_folder / "new").close()
    for instant in range(0, 1000, 6):
        root, log = memory_folder / str(instant), memory_folder / f"{instant}.log"
        shutil.copytree(memory_folder / "new", root)

        def work(instant: int = instant, root: Path = root, log: Path = log) -> str:
            act = kill_at(instant)
            with (
                Workspace.open(root) as workspace,
                workspace.lock(),
                at_transactions(act, workspace.metadata.engine),
                at_calls(act),
            ):
                return two_stages(workspace, log)

        outcome = in_process(work)
        assert outcome.error is None

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
            artifact_ids = workspace.artifacts.ids()
            rows = [row.id for row in workspace.metadata.artifacts()]
        assert id in artifact_ids
        assert set(rows) <= set(artifact_ids)
        assert outcome.killed or outcome.value == id
        notes = log.read_text().split("\n")
        assert [notes.count(f"step {step}") for step in range(3)] in (
            [1, 1, 1],
            [2, 1, 1],
            [1, 2, 1],
            [1, 1, 2],
        )
        ends.add((notes.count("second"), len(artifact_ids)))
        shutil.rmtree(root)
        if not outcome.killed:
            break
    assert instant > 60  # the kills covered all phases of both commits
    # However often the second stage started, it published one model.
    assert ends == {(1, 2), (2, 2)}


@pytest.mark.slow
def test_a_full_disk_at_any_call(memory_folder: Path) -> None:
    """Every fourth call in turn fails with a full disk: the error is one clear line, and nothing is half-written."""
    Workspace.create(memory_folder / "new").close()
    for instant in range(0, 1000, 4):
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
            with at_calls(act, NEEDS_SPACE):
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


def test_a_file_size_limit_raises(workspace: Workspace) -> None:
    """The kernel itself refuses a write."""
    import resource

    def work() -> None:
        with Workspace.open(workspace.root) as other:

            def large(out: Path, scratch: Path) -> Mapping[str, Any]:
                resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
                (out / "large").write_bytes(bytes(2 << 20))
                return {}

            run(other, large)

    assert "StorageError: " in (error := in_process(work).error)
    assert "file too large" in error
    assert workspace.artifacts.ids() == []
    assert run(workspace).kind == "dataset"


def test_a_full_disk_in_native_code_is_a_user_error(workspace: Workspace) -> None:
    def work(out: Path, scratch: Path) -> Mapping[str, Any]:
        raise RuntimeError("PytorchStreamWriter failed: No space left on device (os error 28)")

    with pytest.raises(UserError, match="no space left on device"):
        run(workspace, work)
