"""What the steps measured is written once, or twice, and not into every checkpoint; and comes back all the same."""

import math
import os
import shutil
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from posttrain.train.checkpoint import writer
from posttrain.train.checkpoint import writer as write_module
from posttrain.train.checkpoint.checkpoints import Checkpoints
from posttrain.train.checkpoint.config import CheckpointConfig
from posttrain.train.checkpoint.format import STEPS, Checkpoint

pytestmark = pytest.mark.slow

Make = Callable[..., Checkpoint]
Same = Callable[[Checkpoint | None, Checkpoint], bool]


@pytest.fixture
def added(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many lines each checkpoint wrote."""
    counts: list[int] = []
    append = writer.append

    def counted(path: Path, lines: bytes) -> None:
        counts.append(lines.count(b"\n"))
        append(path, lines)

    monkeypatch.setattr(writer, "append", counted)
    return counts


def inode(checkpoints: Checkpoints, step: int) -> int:
    return (checkpoints.folder / f"step-{step:09d}" / STEPS).stat().st_ino


def contents(folder: Path, step: int) -> list[bytes]:
    """What the file holds that a step's checkpoint had or has, wherever it was put."""
    return [file.read_bytes() for file in folder.glob(f"*-{step:09d}/{STEPS}") if file.is_file()]


def test_only_what_is_new_is_written(now: Checkpoints, make: Make, same: Same, added: list[int]) -> None:
    for step in range(1, 40):
        now.save(step, make(step))
    assert added[:2] == [1, 2], "two files, each whole at first"
    assert added[2:] == [2] * 37, "then each is behind by the steps of two checkpoints"
    assert same(now.latest(), make(39))
    assert same(now.at(38), make(38))
    assert now.steps() == [38, 39]


def test_what_does_not_grow_is_of_one_size(now: Checkpoints, make: Make) -> None:
    sizes = set()
    for step in (10, 50, 90):
        now.save(step, make(step))
        folder = now.folder / f"step-{step:09d}"
        sizes.add(sum(file.stat().st_size for file in folder.iterdir() if file.name not in (STEPS, "manifest.json")))
    assert len(sizes) == 1


def test_neighbours_never_share_a_file(now: Checkpoints, make: Make, same: Same) -> None:
    """So damage of any byte of the newest one's leaves the one before whole."""
    for step in range(1, 9):
        now.save(step, make(step))
        if step > 1:
            assert inode(now, step) != inode(now, step - 1)
    file = now.folder / "step-000000008" / STEPS
    file.write_bytes(b"x" + file.read_bytes()[1:])
    assert same(now.latest(), make(7))
    now.save(9, make(9))
    file = now.folder / "step-000000009" / STEPS
    file.write_bytes(file.read_bytes()[:-1])
    assert same(now.latest(), make(7)), "with its neighbour gone, a file of its own was begun"


def test_the_only_one_that_is_kept_goes_on_with_its_file(
    folder: Path, make: Make, same: Same, added: list[int]
) -> None:
    item = Checkpoints(folder, CheckpointConfig(background=False, keep_last=1))
    for step in range(1, 10):
        item.save(step, make(step))
    assert added == [1] * 9
    assert same(item.latest(), make(9))


def test_going_back_and_another_course(now: Checkpoints, make: Make, same: Same) -> None:
    for step in range(1, 6):
        now.save(step, make(step))
    assert same(now.rewind(4), make(4))
    other = make(7)
    other.steps[4:] = make(7, version=1).steps[4:]
    now.save(7, other)
    now.save(8, replace(make(8), steps=[*other.steps, make(8).steps[7]]))
    assert same(now.at(7), other)
    assert same(now.latest(), replace(make(8), steps=[*other.steps, make(8).steps[7]]))
    now.save(3, make(3, version=2))
    assert same(now.at(3), make(3, version=2)), "fewer steps than the file holds"
    assert same(now.at(8), replace(make(8), steps=[*other.steps, make(8).steps[7]]))


@pytest.mark.parametrize("what", ["removed", "another's", "longer", "shorter", "a folder"])
def test_a_file_that_is_not_what_it_was_is_not_gone_on_with(
    folder: Path, make: Make, same: Same, added: list[int], what: str
) -> None:
    checkpoints = Checkpoints(folder, CheckpointConfig(background=False, keep_last=9))
    for step in (1, 2):
        checkpoints.save(step, make(step))
    file = folder / "step-000000001" / STEPS
    match what:
        case "removed":
            shutil.rmtree(file.parent)
        case "another's":
            shutil.rmtree(file.parent)
            Checkpoints(folder, CheckpointConfig(background=False, keep_last=9)).save(1, make(1, version=5))
            added.pop()
        case "longer":
            file.write_bytes(file.read_bytes() + b"{")
        case "shorter":
            file.write_bytes(file.read_bytes()[:-1])
        case "a folder":
            file.unlink()
            file.mkdir()
    before = contents(folder, 1)
    checkpoints.save(3, make(3))
    assert added == [1, 2, 3]
    assert same(checkpoints.at(3), make(3))
    assert contents(folder, 1) == before


def test_without_second_names(now: Checkpoints, make: Make, same: Same, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise PermissionError("no hard links here")

    monkeypatch.setattr(os, "link", refused)
    for step in range(1, 6):
        now.save(step, make(step))
        assert same(now.latest(), make(step))


def test_a_new_process_begins_files_of_its_own(
    folder: Path, now: Checkpoints, make: Make, same: Same, added: list[int]
) -> None:
    """What another one may still add to its own is nobody else's."""
    for step in range(1, 4):
        now.save(step, make(step))
    added.clear()
    again = Checkpoints(folder, CheckpointConfig(background=False, keep_last=9))
    for step in range(4, 8):
        again.save(step, make(step))
    assert added == [4, 5, 2, 2]
    assert same(now.at(3), make(3))
    assert same(now.latest(), make(7))


def test_no_number(now: Checkpoints, make: Make) -> None:
    steps = make(3).steps
    steps[1] = replace(steps[1], loss=math.nan, group_norms={"head": math.inf})
    for step in (1, 2, 3):
        now.save(step, Checkpoint({}, {}, steps))
    result = now.latest()
    assert result is not None
    assert math.isnan(result.steps[1].loss)
    assert [result.steps[0], result.steps[2]] == [steps[0], steps[2]]


def test_killed_at_every_call_while_a_file_grows(
    savers: Any, request_of: Callable[..., Any], folder: Path, tmp_path: Path, make: Make, same: Same
) -> None:
    """The checkpoint whose file it is must stay whole, and so must the newest."""
    actions = [["save", step, 0] for step in (3, 4, 5)]

    def run(kill_at: int | None) -> list[str]:
        shutil.rmtree(folder, ignore_errors=True)
        (tmp_path / "trace").unlink(missing_ok=True)
        savers.run(request_of(actions, config={"keep_last": 9}, kill_at=kill_at))
        return (tmp_path / "trace").read_text().splitlines()

    events = run(None)
    start = events.index("before link step-000000003/steps.jsonl tmp/*/steps.jsonl")
    assert "during append tmp/*/steps.jsonl" in events[start:]
    for number in range(start, len(events)):
        seen = run(number)
        assert seen == events[: number + 1]
        checkpoints = Checkpoints(folder, CheckpointConfig(background=False, keep_last=9))
        there = [3, 4, 5] if "after rename tmp/* step-000000005" in seen else [3, 4]
        assert checkpoints.steps() == there
        for step in there:
            assert same(checkpoints.at(step), make(step)), seen[-1]


def test_the_writer_leaves_the_cores_to_the_training(
    background: Callable[..., Checkpoints], make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    def priority() -> int:
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    result = []
    write_tensors = write_module.write_tensors

    def noted(*arguments: Any) -> Any:
        result.append(priority())
        return write_tensors(*arguments)

    monkeypatch.setattr(write_module, "write_tensors", noted)
    mine = priority()
    checkpoints = background()
    checkpoints.save(1, make(1))
    checkpoints.close()
    assert result == [10 if sys.platform == "linux" else mine]  # elsewhere a priority is the whole process's
    assert priority() == mine
