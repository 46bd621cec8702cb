"""Trials are divided among the GPUs of a machine, and one that runs out of memory beside others is run again."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from posttrain.jobs import gpus
from posttrain.testing.backends import RecordingHandler, run_jobs
from posttrain.tune.api import optimize
from posttrain.tune.backends import processes
from posttrain.tune.backends.base import Job
from posttrain.tune.backends.inline import InlineBackend, run_job
from posttrain.tune.backends.processes import ProcessBackend
from posttrain.tune.context import TrialContext
from posttrain.tune.schedulers.base import Decision
from posttrain.tune.trial import Memory


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
    monkeypatch.setattr(subprocess, "run", None)
    assert not gpus.has_gpu()
    assert gpus.free_gpu_bytes() == {}


def test_the_peak_of_a_trial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory of a GPU is measured anew for each trial, and of a process that uses none it is 0."""

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

        def report(_: object, memory: Memory) -> Decision:
            peaks.append(memory)
            return Decision.CONTINUE

        outcome = run_job(function, Job(0, {}, tmp_path / "0", 0, None, 0), report)
        return [*peaks, outcome.memory]

    cuda = Cuda()

    def function(trial: TrialContext) -> float:
        cuda.peak = 1 << 30
        trial.report(1, 0.5)
        cuda.peak = 3 << 30
        return 0.5

    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    context = gpus.peak_gpu_bytes() - (5 << 30)
    assert 0 < context < 1 << 30
    assert [peak.gpu - context for peak in run(function)] == [1 << 30, 3 << 30]
    assert [peak.gpu - context for peak in run(lambda trial: 1.0)] == [0]
    monkeypatch.delitem(sys.modules, "torch")
    assert [peak.gpu for peak in run(lambda trial: 1.0)] == [0]


@pytest.mark.slow
def test_trials_are_divided_among_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "free_gpu_bytes", lambda: {"GPU-a": 100, "7": 80})
    folder = str(tmp_path)

    def function(trial: TrialContext) -> float:
        import time

        gpu = os.environ["CUDA_VISIBLE_DEVICES"]
        with open(f"{folder}/{trial.number} {gpu}", "w"):
            pass
        waits = 3 if trial.number < 4 else 0  # for as many as that to begin
        while len([name for name in os.listdir(folder) if " " in name]) <= waits:
            time.sleep(0.02)
        return float(gpu == "7")

    handler = RecordingHandler()
    with ProcessBackend(function, 4) as backend:
        assert list(backend.gpu_bytes()) == [100, 80]
        jobs = [Job(number, {}, tmp_path / str(number), 0, None, 0) for number in range(8)]
        run_jobs(backend, jobs[:4], handler)
        run_jobs(backend, jobs[4:6], handler)  # of four idle workers
        assert len(backend._idle) == 4
        # One after the other all are the first GPU's, as none is busy.
        run_jobs(backend, jobs[6:7], handler)
    values = [handler.outcomes[number][0].value for number in range(7)]
    assert values == [0, 1, 0, 1, 0, 1, 0]


@pytest.mark.slow
def test_out_of_memory_beside_others_is_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second trial finds no memory while the first runs; the third begins after it, and not beside it."""
    monkeypatch.setattr(ProcessBackend, "available_bytes", lambda self: None)
    folder = str(tmp_path)

    def function(trial: TrialContext) -> float:
        import time

        log = Path(folder, "log")
        with log.open("a") as file:
            file.write(f"begin {trial.number}\n")
        if trial.number == 0:
            while "begin 1" not in log.read_text():
                time.sleep(0.02)
            time.sleep(1.0)  # until the study has heard of the end of the other
        if trial.number == 1:
            while "begin 0" not in log.read_text():
                time.sleep(0.02)
            if "end 0" not in log.read_text():
                raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB")
        with log.open("a") as file:
            file.write(f"end {trial.number}\n")
        return 1.0

    space = {"x": {"float": [0, 1]}}
    result = optimize(lambda: ProcessBackend(function, 2), space, budget="3 trials", sampler="quasi_random")
    assert [trial.state for trial in result.trials] == ["finished"] * 3
    lines = (tmp_path / "log").read_text().splitlines()
    assert sorted(lines[:2]) == ["begin 0", "begin 1"]
    assert lines[2:] == ["end 0", "begin 1", "end 1", "begin 2", "end 2"]


def test_out_of_memory_alone_is_a_failure() -> None:
    def function(trial: TrialContext) -> float:
        if trial.number:
            return 1.0
        raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB")

    space = {"x": {"float": [0, 1]}}
    trial, other = optimize(lambda: InlineBackend(function), space, budget="2 trials", sampler="quasi_random").trials
    assert (trial.state, trial.error) == ("failed", "out of memory: CUDA out of memory. Tried to allocate 2.00 GiB")
    assert other.state == "finished"
