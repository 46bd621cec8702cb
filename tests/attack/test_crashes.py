"""A power cut loses nothing that the store has reported, and leaves nothing that the same work cannot continue from."""

import os
import random
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from crash_states import PowerCut, write_state
from crash_workloads import WORKLOADS
from crashes import MEMORY, MOMENTS, Attack, cut_power
from file_layer import Names, Recorder, Sync

from posttrain.store.files import make_folder, write_atomically

pytestmark = pytest.mark.slow


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder in memory, where an fsync takes no time."""
    with tempfile.TemporaryDirectory(dir=MEMORY if MEMORY.is_dir() else None) as name:
        yield Path(name)


@pytest.mark.parametrize("workload", WORKLOADS)
def test_a_power_cut_at_a_random_moment(workload: str, folder: Path) -> None:
    result = cut_power(workload, folder, count=10, shared_by=3)
    assert (result.count, result.findings) == (10, [])
    assert set(result.moments) == set(MOMENTS)


@pytest.mark.parametrize("workload", ["stages", "champion", "feedback", "checkpoints", "scores"])
def test_what_was_reported_is_on_the_disk(workload: str, folder: Path) -> None:
    """Everything is lost that may be lost, right after each report."""
    result = Attack(workload, folder).cut_after_promises()
    assert result.count > 3
    assert result.findings == []


@pytest.mark.parametrize("workload", ["stages", "restore"])
def test_what_a_killed_process_left_is_on_the_disk_before_it_is_recorded(workload: str, folder: Path) -> None:
    attack = Attack(workload, folder)
    changes = [change for entry in attack.trace.operations if isinstance(entry, Names) for change in entry.changes]
    homes = [inode for _, name, inode in changes if name == ".posttrain"]
    [artifacts] = [inode for folder, name, inode in changes if name == "artifacts" and folder in homes]
    kills = [kill for kill in attack.kills if attack.trace.operations[kill] == Sync(artifacts)]
    assert len(kills) >= 4
    attack.kills = sorted(kills)[-2:]
    assert attack.cut_after_kills().findings == []


@pytest.mark.each_change
@pytest.mark.parametrize(
    ("workload", "kind"), [("stages", "folder"), ("feedback", "file"), ("checkpoints", "folder"), ("scores", "file")]
)
def test_without_syncs_something_is_lost(
    workload: str, kind: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The simulation can fail: it finds losses where the syncs of files, or of folders, do nothing."""
    note = Recorder.note

    def note_no_sync(recorder: Recorder, operation: object) -> None:
        if not (isinstance(operation, Sync) and recorder.trace.inodes[operation.inode].kind == kind):
            note(recorder, operation)

    monkeypatch.setattr(Recorder, "note", note_no_sync)
    assert Attack(workload, folder).cut_after_promises().findings != []


def states(root: Path, work: Callable[[], object], count: int = 400) -> list[dict[str, bytes | None]]:
    """Returns states after power cuts at random moments of some work."""
    recorder = Recorder(root)
    with recorder.recording():
        work()
    draw = random.Random(0)
    points = range(len(recorder.trace.operations) + 1)
    drawn = []
    for _ in range(count):
        with tempfile.TemporaryDirectory(dir=root.parent) as name:
            state = PowerCut(recorder.trace, draw.choice(points)).draw(draw)
            write_state(recorder.trace, state, Path(name))
            paths = sorted(Path(name).rglob("*"))
            drawn.append({str(path.relative_to(name)): path.read_bytes() if path.is_file() else None for path in paths})
    return drawn


def test_the_model_keeps_what_was_synced_and_nothing_else(folder: Path) -> None:
    root = folder / "disk"
    root.mkdir()
    old, new = b"old" * 500, b"new" * 400
    (root / "a").write_bytes(old)
    assert {state["a"] for state in states(root, lambda: write_atomically(root / "a", new))} == {old, new}

    def write_in_place() -> None:
        with (root / "a").open("r+b") as file:
            file.write(b"x" * 1500)
            file.flush()
            os.fsync(file.fileno())
            file.write(b"y" * 1500)

    contents = [state["a"] for state in states(root, write_in_place)]
    assert all(content.startswith(b"x" * 1500) for content in contents if b"y" in content)
    assert any(b"new" in content and b"x" in content for content in contents)
    assert any(0 < content.count(b"y") < 1500 and b"\0" not in content for content in contents)
    assert any(content.endswith(b"y") and b"\0" * 512 in content for content in contents)
    assert {new, b"x" * 1500, b"x" * 1500 + b"y" * 1500} <= set(contents)


def test_the_model_loses_names_that_were_not_synced(folder: Path) -> None:
    root = folder / "disk"
    root.mkdir()

    def work() -> None:
        (root / "unsynced").mkdir()
        make_folder(root / "synced" / "inner")
        write_atomically(root / "unsynced" / "file", b"1")
        os.rename(root / "synced" / "inner", root / "renamed")

    names = [set(state) for state in states(root, work)]
    assert set() in names
    assert {"synced", "synced/inner", "unsynced", "unsynced/file"} in names
    assert {"synced", "renamed", "unsynced", "unsynced/file"} in names
    assert not any({"synced/inner", "renamed"} <= state for state in names)
    # A sync of `synced` is not a sync of its own name, but the folder above was synced for that.
    assert all("synced" in state for state in names if "renamed" in state)
