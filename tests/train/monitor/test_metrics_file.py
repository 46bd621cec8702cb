"""The workspace's own record: one line a step, through kills, resumes and roll-backs."""

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from posttrain.store.errors import UserError
from posttrain.train.monitor.decisions import Decision, Finding
from posttrain.train.monitor.metrics import JsonlSink, StepValues, read_steps

MakeValues = Callable[..., StepValues]

SKIPPED = Decision(Finding("explosion", 4, "gradient norm 90 is 100 times the median", 90.0, 5.0), "skip")
TOLD = {4: [SKIPPED]}


def write(sink: JsonlSink, make_values: MakeValues, steps: Sequence[int]) -> None:
    for step in steps:
        sink.write(make_values(step), [SKIPPED] if step == 4 else [])


@pytest.fixture
def path(tmp_path: Path, make_values: MakeValues) -> Path:
    """A file with the steps 0 to 9."""
    path = tmp_path / "out" / "metrics.jsonl"
    sink = JsonlSink(path)
    write(sink, make_values, range(10))
    sink.close()
    return path


def steps(path: Path) -> list[int]:
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def test_one_line_a_step(path: Path, make_values: MakeValues) -> None:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(10))
    assert lines[4].pop("decisions") == [SKIPPED.to_json()]
    assert lines[4] == make_values(4).to_json()
    assert all("decisions" not in line for line in lines)
    assert [line["step"] for line in read_steps(path)] == list(range(10))


def test_a_line_is_there_as_soon_as_it_is_written(path: Path, make_values: MakeValues) -> None:
    sink = JsonlSink(path)
    for step in (10, 11):
        sink.write(make_values(step, loss=math.nan), [])
        assert read_steps(path)[-1]["step"] == step
        assert read_steps(path)[-1]["loss"] is None
    sink.close()


@pytest.mark.parametrize("start", [0, 1, 6, 10])
def test_after_a_resume_no_step_stands_twice(path: Path, make_values: MakeValues, start: int) -> None:
    before = path.read_bytes()
    sink = JsonlSink(path)
    assert path.read_bytes() == before
    sink.rewind([make_values(step) for step in range(start)], TOLD)
    write(sink, make_values, range(start, 10))
    sink.close()
    assert path.read_bytes() == before


@pytest.mark.parametrize("tail", [b'{"step": 10, "lo', b'{"step": 10}', b"{", b"\0" * 100, b"[10]\n", b'{"loss": 1}\n'])
def test_what_a_kill_leaves_is_removed(
    path: Path, make_values: MakeValues, caplog: pytest.LogCaptureFixture, tail: bytes
) -> None:
    whole = path.read_bytes()
    path.write_bytes(whole + tail)
    assert [line["step"] for line in read_steps(path)] == list(range(10))
    JsonlSink(path).close()
    assert path.read_bytes() == whole
    assert len(caplog.messages) == 1
    assert "cannot be read" in caplog.messages[0]


def test_damage_amid_the_file_costs_what_follows_and_is_named(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:3], b"\xff" + lines[3], *lines[4:]]))
    JsonlSink(path).close()
    assert steps(path) == [0, 1, 2]
    assert len(caplog.messages) == 1


@pytest.mark.parametrize("lost", [slice(0, 10), slice(3, 4), slice(4, 7), slice(9, 10), slice(2, 10)], ids=str)
@pytest.mark.parametrize("damaged", [False, True])
def test_lines_of_steps_that_stand_are_written_again(
    path: Path, make_values: MakeValues, caplog: pytest.LogCaptureFixture, lost: slice, damaged: bool
) -> None:
    whole = path.read_bytes()
    lines = whole.splitlines(keepends=True)
    lines[lost] = [b"\0" * len(line) for line in lines[lost]] if damaged else []
    path.write_bytes(b"".join(lines))
    sink = JsonlSink(path)
    sink.rewind([make_values(step) for step in range(10)], TOLD)
    sink.close()
    assert path.read_bytes() == whole
    assert f"the lines of {10 - lost.start} steps from {lost.start} on are written again" in caplog.messages[-1]


def test_lines_that_are_there_stay_as_they_are(path: Path, make_values: MakeValues) -> None:
    before = path.read_bytes()
    sink = JsonlSink(path)
    sink.rewind([make_values(step, seconds=9.0) for step in range(10)], {})
    sink.close()
    assert path.read_bytes() == before


def test_going_back_within_a_training(path: Path, make_values: MakeValues) -> None:
    sink = JsonlSink(path)
    sink.rewind([make_values(step) for step in range(7)], TOLD)
    write(sink, make_values, [7, 8])
    sink.close()
    assert steps(path) == list(range(9))


def test_a_file_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="a file has the folder's path"):
        JsonlSink(tmp_path / "file" / "metrics.jsonl")
