"""The GPUs of a machine, and the memory that tasks take of them."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from posttrain.jobs import gpus
from posttrain.jobs.memory import Memory
from posttrain.jobs.task import Task, TaskContext, run_task


@pytest.fixture
def nvidia(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "nvidia0").touch()
    monkeypatch.setattr(gpus, "DEVICES", tmp_path)


def answer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, script: str) -> None:
    """Has a script answer in place of Python with torch."""
    program = tmp_path / "python"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))


@pytest.mark.usefixtures("nvidia")
@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        (None, {"0": 10, "1": 20}),
        ("", {"0": 10, "1": 20}),
        ("GPU-5a, 3", {"GPU-5a": 10, "3": 20}),
    ],
)
def test_gpus_have_the_names_that_a_process_sees(
    visible: str | None, expected: dict[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer(monkeypatch, tmp_path, "echo a warning of a driver\necho '[10, 20]'")
    monkeypatch.delenv(gpus.VISIBLE, raising=False)
    if visible is not None:
        monkeypatch.setenv(gpus.VISIBLE, visible)
    assert gpus.free_gpu_bytes() == expected


@pytest.mark.usefixtures("nvidia")
@pytest.mark.slow
def test_there_is_none_where_torch_cannot_use_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert gpus.has_gpu()
    assert gpus.free_gpu_bytes() == {}  # torch of this environment is the processor's
    assert not caplog.records
    answer(monkeypatch, tmp_path, "echo RuntimeError: the driver is too old >&2; exit 1")
    assert gpus.free_gpu_bytes() == {}
    assert caplog.messages == ["  the GPUs' memory is not known: RuntimeError: the driver is too old"]


def test_nothing_is_asked_where_there_is_no_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "DEVICES", tmp_path)
    monkeypatch.setattr(gpus, "run_command", None)
    assert not gpus.has_gpu()
    assert gpus.free_gpu_bytes() == {}


def test_the_peak_of_a_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory of a GPU is measured for each task, and of a process that uses none it is 0."""

    class Cuda:
        reserved = peak = 5 << 30

        def is_initialized(self) -> bool:
            return True

        def empty_cache(self) -> None:
            self.reserved = 0

        def reset_peak_memory_stats(self) -> None:
            self.peak = self.reserved

        def max_memory_reserved(self) -> int:
            return self.peak

    def run(function: Any) -> list[Memory]:
        peaks: list[Memory] = []

        def send(_: object, memory: Memory) -> None:
            peaks.append(memory)

        outcome = run_task(function, Task(0, None, tmp_path / "0"), send, lambda: True)
        return [*peaks, outcome.memory]

    cuda = Cuda()

    def function(context: TaskContext) -> float:
        cuda.peak = 1 << 30
        context.send(0.5)
        cuda.peak = 3 << 30
        return 0.5

    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    context = gpus.peak_gpu_bytes() - (5 << 30)
    assert 0 < context < 1 << 30
    assert [peak.gpu - context for peak in run(function)] == [1 << 30, 3 << 30]
    assert [peak.gpu - context for peak in run(lambda context: 1.0)] == [0]
    monkeypatch.delitem(sys.modules, "torch")
    assert [peak.gpu for peak in run(lambda context: 1.0)] == [0]
