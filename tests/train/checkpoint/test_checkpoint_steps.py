"""Step values are written once or twice, not into every checkpoint, and load unchanged."""

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

from faults import Process
from posttrain.train.checkpoint import writer
from posttrain.train.checkpoint import writer as write_module
from posttrain.train.checkpoint.checkpoints import Checkpoints
from posttrain.train.checkpoint.config import CheckpointConfig
from posttrain.train.checkpoint.format import STEPS, Checkpoint

pytestmark = pytest.mark.slow

Make = Callable[..., Checkpoint]
Same = Callable[[Checkpoint | None, Checkpoint], bool]


@pytest.fixture
def line_counts(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many lines each checkpoint wrote."""
    counts: list[int] = []
    append = writer.append

    def count_lines(path: Path, lines: bytes) -> None:
        counts.append(lines.count(b"\n"))
        append(path, lines)

    monkeypatch.setattr(writer, "append", count_lines)
    return counts


def inode(checkpoints: Checkpoints, step: int) -> int:
    return (checkpoints.folder / f"step-{step:09d}" / STEPS).stat().st_ino


def contents(folder: Path, step: int) -> list[bytes]:
    """The contents of the step file that belongs to a step's checkpoint, wherever it was moved."""
    return [file.read_bytes() for file in folder.glob(f"*-{step:09d}/{STEPS}") if file.is_file()]


def test_only_new_steps_are_written(foreground: Checkpoints, make: Make, same: Same, line_counts: list[int]) -> None:
    for step in range(1, 40):
        foreground.save(step, make(step))
    assert line_counts[:2] == [1, 2], "two files, each complete at first"
    assert line_counts[2:] == [2] * 37, "then each lacks the steps of two checkpoints"
    assert same(foreground.latest(), make(39))
    assert same(foreground.at(38), make(38))
    assert foreground.steps() == [38, 39]


def test_files_other_than_the_steps_do_not_grow(foreground: Checkpoints, make: Make) -> None:
    sizes = set()
    for step in (10, 50, 90):
        foreground.save(step, make(step))
        folder = foreground.folder / f"step-{step:09d}"
        sizes.add(sum(file.stat().st_size for file in folder.iterdir() if file.name not in (STEPS, "manifest.json")))
    assert len(sizes) == 1


def test_neighbours_never_share_a_file(foreground: Checkpoints, make: Make, same: Same) -> None:
    """So damage of the newest file leaves the previous checkpoint intact."""
    for step in range(1, 9):
        foreground.save(step, make(step))
        if step > 1:
            assert inode(foreground, step) != inode(foreground, step - 1)
    file = foreground.folder / "step-000000008" / STEPS
    file.write_bytes(b"x" + file.read_bytes()[1:])
    assert same(foreground.latest(), make(7))
    foreground.save(9, make(9))
    file = foreground.folder / "step-000000009" / STEPS
    file.write_bytes(file.read_bytes()[:-1])
    assert same(foreground.latest(), make(7)), "without a neighbour, the checkpoint starts its own file"


def test_a_single_checkpoint_extends_its_own_file(folder: Path, make: Make, same: Same, line_counts: list[int]) -> None:
    checkpoints = Checkpoints(folder, CheckpointConfig(background=False, keep_last=1))
    for step in range(1, 10):
        checkpoints.save(step, make(step))
    assert line_counts == [1] * 9
    assert same(checkpoints.latest(), make(9))


def test_rewind_and_different_values(foreground: Checkpoints, make: Make, same: Same) -> None:
    for step in range(1, 6):
        foreground.save(step, make(step))
    assert same(foreground.rewind(4), make(4))
    other = make(7)
    other.steps[4:] = make(7, version=1).steps[4:]
    foreground.save(7, other)
    foreground.save(8, replace(make(8), steps=[*other.steps, make(8).steps[7]]))
    assert same(foreground.at(7), other)
    assert same(foreground.latest(), replace(make(8), steps=[*other.steps, make(8).steps[7]]))
    foreground.save(3, make(3, version=2))
    assert same(foreground.at(3), make(3, version=2)), "fewer steps than the file holds"
    assert same(foreground.at(8), replace(make(8), steps=[*other.steps, make(8).steps[7]]))


@pytest.mark.parametrize("change", ["removed", "another's", "longer", "shorter", "a folder"])
def test_a_changed_file_is_not_extended(
    folder: Path, make: Make, same: Same, line_counts: list[int], change: str
) -> None:
    checkpoints = Checkpoints(folder, CheckpointConfig(background=False, keep_last=9))
    for step in (1, 2):
        checkpoints.save(step, make(step))
    file = folder / "step-000000001" / STEPS
    match change:
        case "removed":
            shutil.rmtree(file.parent)
        case "another's":
            shutil.rmtree(file.parent)
            Checkpoints(folder, CheckpointConfig(background=False, keep_last=9)).save(1, make(1, version=5))
            line_counts.pop()
        case "longer":
            file.write_bytes(file.read_bytes() + b"{")
        case "shorter":
            file.write_bytes(file.read_bytes()[:-1])
        case "a folder":
            file.unlink()
            file.mkdir()
    before = contents(folder, 1)
    checkpoints.save(3, make(3))
    assert line_counts == [1, 2, 3]
    assert same(checkpoints.at(3), make(3))
    assert contents(folder, 1) == before


def test_without_hard_links_files_are_copied(
    foreground: Checkpoints, make: Make, same: Same, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError("no hard links here")

    monkeypatch.setattr(os, "link", refuse)
    for step in range(1, 6):
        foreground.save(step, make(step))
        assert same(foreground.latest(), make(step))


def test_a_new_process_starts_its_own_files(
    folder: Path, foreground: Checkpoints, make: Make, same: Same, line_counts: list[int]
) -> None:
    """Another process may still append to its own files."""
    for step in range(1, 4):
        foreground.save(step, make(step))
    line_counts.clear()
    checkpoints = Checkpoints(folder, CheckpointConfig(background=False, keep_last=9))
    for step in range(4, 8):
        checkpoints.save(step, make(step))
    assert line_counts == [4, 5, 2, 2]
    assert same(foreground.at(3), make(3))
    assert same(foreground.latest(), make(7))


def test_nan_and_infinite_values_load_unchanged(foreground: Checkpoints, make: Make) -> None:
    steps = make(3).steps
    steps[1] = replace(steps[1], loss=math.nan, group_norms={"head": math.inf})
    for step in (1, 2, 3):
        foreground.save(step, Checkpoint({}, {}, steps))
    result = foreground.latest()
    assert result is not None
    assert math.isnan(result.steps[1].loss)
    assert [result.steps[0], result.steps[2]] == [steps[0], steps[2]]


def test_killed_at_a_call_while_a_file_grows(
    start_saver: Callable[..., Process], folder: Path, tmp_path: Path, make: Make, same: Same
) -> None:
    """The checkpoint that owns the file must stay intact, and so must the newest."""
    actions = [["save", step, 0] for step in (3, 4, 5)]

    def run(kill_at: int | None) -> list[str]:
        shutil.rmtree(folder, ignore_errors=True)
        (tmp_path / "trace").unlink(missing_ok=True)
        start_saver(actions, config={"keep_last": 9}, kill_at=kill_at).wait()
        return (tmp_path / "trace").read_text().splitlines()

    events = run(None)
    start = events.index("before link step-000000003/steps.jsonl tmp/*/steps.jsonl")
    assert "during append tmp/*/steps.jsonl" in events[start:]
    for number in range(start, len(events), 7):
        reached = run(number)
        assert reached == events[: number + 1]
        checkpoints = Checkpoints(folder, CheckpointConfig(background=False, keep_last=9))
        steps = [3, 4, 5] if "after rename tmp/* step-000000005" in reached else [3, 4]
        assert checkpoints.steps() == steps
        for step in steps:
            assert same(checkpoints.at(step), make(step)), reached[-1]


def test_the_writer_has_low_priority(
    background: Callable[..., Checkpoints], make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    def priority() -> int:
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    result = []
    write_tensors = write_module.write_tensors

    def record_priority(*arguments: Any) -> Any:
        result.append(priority())
        return write_tensors(*arguments)

    monkeypatch.setattr(write_module, "write_tensors", record_priority)
    own_priority = priority()
    checkpoints = background()
    checkpoints.save(1, make(1))
    checkpoints.close()
    assert result == [
        10 if sys.platform == "linux" else own_priority
    ]  # elsewhere the priority belongs to the whole process
    assert priority() == own_priority
