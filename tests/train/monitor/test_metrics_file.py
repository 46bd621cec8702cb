"""The metrics file: one line per step, through kills, resumes and rollbacks."""

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from posttrain.store.errors import UserError
from posttrain.train.monitor.decisions import Finding, MonitorDecision
from posttrain.train.monitor.metrics import JsonlSink, StepValues, read_steps

MakeValues = Callable[..., StepValues]

SKIPPED = MonitorDecision(Finding("explosion", 4, "gradient norm 90 is 100 times the median", 90.0, 5.0), "skip")
REPORTED = {4: [SKIPPED]}


def write_steps(sink: JsonlSink, make_values: MakeValues, steps: Sequence[int]) -> None:
    for step in steps:
        sink.write(make_values(step), [SKIPPED] if step == 4 else [])


@pytest.fixture
def path(tmp_path: Path, make_values: MakeValues) -> Path:
    """A file with the steps 0 to 9."""
    path = tmp_path / "out" / "metrics.jsonl"
    sink = JsonlSink(path)
    write_steps(sink, make_values, range(10))
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


def test_a_line_is_readable_at_once(path: Path, make_values: MakeValues) -> None:
    sink = JsonlSink(path)
    for step in (10, 11):
        sink.write(make_values(step, loss=math.nan), [])
        assert read_steps(path)[-1]["step"] == step
        assert read_steps(path)[-1]["loss"] is None
    sink.close()


@pytest.mark.parametrize("start", [0, 1, 6, 10])
def test_a_resume_repeats_no_step(path: Path, make_values: MakeValues, start: int) -> None:
    before = path.read_bytes()
    sink = JsonlSink(path)
    assert path.read_bytes() == before
    sink.rewind([make_values(step) for step in range(start)], REPORTED)
    write_steps(sink, make_values, range(start, 10))
    sink.close()
    assert path.read_bytes() == before


@pytest.mark.parametrize("tail", [b'{"step": 10, "lo', b'{"step": 10}', b"{", b"\0" * 100, b"[10]\n", b'{"loss": 1}\n'])
def test_a_partial_line_is_removed(
    path: Path, make_values: MakeValues, caplog: pytest.LogCaptureFixture, tail: bytes
) -> None:
    original = path.read_bytes()
    path.write_bytes(original + tail)
    assert [line["step"] for line in read_steps(path)] == list(range(10))
    JsonlSink(path).close()
    assert path.read_bytes() == original
    assert len(caplog.messages) == 1
    assert "cannot be read" in caplog.messages[0]


def test_damage_removes_the_rest_of_the_file(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:3], b"\xff" + lines[3], *lines[4:]]))
    JsonlSink(path).close()
    assert steps(path) == [0, 1, 2]
    assert len(caplog.messages) == 1


@pytest.mark.parametrize("missing", [slice(0, 10), slice(3, 4), slice(4, 7), slice(9, 10), slice(2, 10)], ids=str)
@pytest.mark.parametrize("damaged", [False, True])
def test_missing_lines_are_written_again(
    path: Path, make_values: MakeValues, caplog: pytest.LogCaptureFixture, missing: slice, damaged: bool
) -> None:
    original = path.read_bytes()
    lines = original.splitlines(keepends=True)
    lines[missing] = [b"\0" * len(line) for line in lines[missing]] if damaged else []
    path.write_bytes(b"".join(lines))
    sink = JsonlSink(path)
    sink.rewind([make_values(step) for step in range(10)], REPORTED)
    sink.close()
    assert path.read_bytes() == original
    # The command line's log says "1 step"; it is set up where another test has called it.
    text = caplog.messages[-1].replace(" 1 step ", " 1 steps ")
    assert f"the lines of {10 - missing.start} steps from {missing.start} on are written again" in text


def test_rewind_keeps_existing_lines(path: Path, make_values: MakeValues) -> None:
    before = path.read_bytes()
    sink = JsonlSink(path)
    sink.rewind([make_values(step, seconds=9.0) for step in range(10)], {})
    sink.close()
    assert path.read_bytes() == before


def test_rewind_within_a_training(path: Path, make_values: MakeValues) -> None:
    sink = JsonlSink(path)
    sink.rewind([make_values(step) for step in range(7)], REPORTED)
    write_steps(sink, make_values, [7, 8])
    sink.close()
    assert steps(path) == list(range(9))


def test_an_unwritable_file_is_a_user_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="a file has the folder's path"):
        JsonlSink(tmp_path / "file" / "metrics.jsonl")
