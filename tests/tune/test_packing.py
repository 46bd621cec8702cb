"""Trials are packed by measured memory: never more than there is, and the study is the same as with one worker."""

import logging
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from posttrain.tune import TuneResult
from posttrain.tune.api import optimize
from posttrain.tune.backends import processes
from posttrain.tune.backends.base import Handler, Job, Outcome
from posttrain.tune.backends.processes import LocalProcess, ProcessBackend
from posttrain.tune.backends.simulated import CurvePoint, SimulatedBackend
from posttrain.tune.context import TrialContext
from posttrain.tune.packing import MemoryPacking
from posttrain.tune.schedulers.base import Decision
from posttrain.tune.trial import Memory, Report

GB = 10**9
SPACE = {"x": {"float": [0, 1]}, "memory": {"value": 2 * GB}}
HALVING = {"name": "successive_halving", "max_resource": 9}


class Machine(SimulatedBackend):
    """A simulated machine of ``total`` bytes, whose trials take ``memory`` bytes; tells what was in use at a time.

    Each trial takes ``gpu`` bytes of one of its ``gpus``, too.
    """

    def __init__(self, total: int | None, workers: int = 8, seconds: Callable[[Any], float] = lambda _: 1.0) -> None:
        def curve(settings: Mapping[str, Any]) -> Iterator[CurvePoint]:
            for step in range(1, 10):
                yield CurvePoint(settings["x"] + 1 / step, seconds=seconds(settings))

        super().__init__(curve, workers=workers)
        self.total, self.running, self.most, self.runs = total, dict[int, int](), 0, list[int]()
        self.counts: list[int] = []
        self.gpus, self.gpu = list[int](), 0

    def available_bytes(self) -> int | None:
        return self.total

    def gpu_bytes(self) -> list[int]:
        return self.gpus

    def start(self, job: Job) -> None:
        assert job.number not in self.running
        self.running[job.number] = job.settings["memory"]
        self.runs.append(job.number)
        self.counts.append(len(self.running))
        self.most = max(self.most, sum(self.running.values()))
        super().start(job)

    def wait(self, handler: Handler, seconds: float | None = None) -> None:
        machine = self

        class Measured:
            def report(self, number: int, report: Report, memory: Memory) -> Decision:
                return handler.report(number, report, Memory(machine.running[number], machine.gpu))

            def ended(self, number: int, outcome: Outcome) -> None:
                memory = Memory(machine.running.pop(number), machine.gpu)
                handler.ended(number, replace(outcome, memory=memory))

        super().wait(Measured(), seconds)


def search(machine: Machine, space: Any = SPACE, **options: Any) -> TuneResult:
    options = {"budget": "9 trials", "sampler": "quasi_random", "scheduler": HALVING, **options}
    return optimize(lambda: machine, space, **options)


def outcomes(result: TuneResult) -> list[tuple[Any, ...]]:
    return [(trial.settings, trial.state, [(r.step, r.value) for r in trial.reports]) for trial in result.trials]


@pytest.mark.parametrize(("total", "expected"), [(2, 1), (4, 1), (5, 2), (9, 4), (100, 8)])
def test_as_many_run_as_fit(total: int, expected: int) -> None:
    # 8% stay free: two trials of 2 GB need more than 4 GB.
    machine = Machine(total * GB)
    result = search(machine)
    assert max(machine.counts) == expected
    assert machine.most <= max(2, total) * GB
    assert outcomes(result) == outcomes(search(Machine(None)))
    assert all(trial.memory_bytes == 2 * GB for trial in result.trials if trial.ended)


def test_without_a_limit_all_workers_are_busy_at_once() -> None:
    machine = Machine(None)
    search(machine)
    assert machine.counts[:8] == list(range(1, 9))


def test_the_first_trial_runs_alone_until_its_first_report() -> None:
    machine, most = Machine(100 * GB), []

    def wait(handler: Handler, seconds: float | None = None) -> None:
        most.append(len(machine.running))
        Machine.wait(machine, handler, seconds)

    machine.wait = wait  # type: ignore[method-assign]
    search(machine)
    assert most[:2] == [1, 8]


def test_a_study_that_goes_on_knows_what_its_trials_took(tmp_path: Path) -> None:
    search(Machine(9 * GB), out=tmp_path, budget="3 trials", scheduler="none")
    machine = Machine(9 * GB)
    search(machine, out=tmp_path, budget="9 trials", scheduler="none")
    assert machine.counts[:4] == [1, 2, 3, 4]
    assert max(machine.counts) == 4


def test_trials_pause_where_others_turn_out_to_be_larger() -> None:
    # The first is small, so that eight begin; the others take eight times as much.
    space = {"x": {"float": [0, 1]}, "memory": {"choice": [GB, 8 * GB]}}
    points = [{"x": 0.5, "memory": GB}, *({"x": x / 8, "memory": 8 * GB} for x in range(8))]
    options = {"initial": points, "space": space, "scheduler": {"name": "none", "max_resource": 9}}
    machine = Machine(18 * GB)
    result = search(machine, **options)
    assert outcomes(result) == outcomes(search(Machine(None), **options))
    assert len(machine.runs) > 9  # some were run again from their checkpoints
    assert sum(machine.running.values()) == 0
    # After the first pauses no more start than fit.
    assert max(machine.counts[9:]) <= 2


def test_one_trial_runs_however_large_it_is() -> None:
    machine = Machine(GB)
    result = search(machine)
    assert max(machine.counts) == 1
    assert outcomes(result) == outcomes(search(Machine(None)))


def test_memory_that_others_take_has_trials_pause() -> None:
    machine = Machine(100 * GB)

    def available() -> int:
        return 100 * GB if len(machine.runs) < 9 else 5 * GB

    machine.available_bytes = available  # type: ignore[method-assign]
    result = search(machine, scheduler={"name": "none", "max_resource": 9}, budget="12 trials")
    assert all(trial.step == 9 for trial in result.trials)
    assert len(machine.runs) > 12
    assert max(machine.counts[9:]) <= 2


@pytest.mark.parametrize(("total", "memory", "beside"), [(100 * GB, 60 * GB, 1), (100 * GB, 1, 8), (None, 1, 8)])
def test_a_trial_that_is_killed_beside_others_runs_alone(total: int | None, memory: int, beside: int) -> None:
    """Its memory counts for the others; where nobody knows of a machine's memory, it runs beside them again."""

    class Killing(Machine):
        killed = False

        def wait(self, handler: Handler, seconds: float | None = None) -> None:
            if 3 in self.running and len(self.running) > 3 and not self.killed:
                self.killed = True
                SimulatedBackend.kill(self, 3)
                del self.running[3]
                handler.ended(3, Outcome("killed", seconds=0.5, memory=Memory(memory)))
            else:
                super().wait(handler, seconds)

    machine = Killing(total)
    options = {"scheduler": "none", "budget": "20 trials"}
    result = search(machine, **options)
    again = [count for number, count in zip(machine.runs, machine.counts, strict=True) if number == 3][1]
    assert again == (1 if total else 8)
    assert max(machine.counts[9:]) == beside
    assert result.trials[3].memory_bytes == max(memory, 2 * GB)
    assert outcomes(result) == outcomes(search(Machine(None), **options))


def test_what_limits_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "posttrain"):
        search(Machine(5 * GB))
    lines = [record.getMessage() for record in caplog.records if "memory" in record.getMessage()]
    assert lines == ["  memory for 2 at a time: a trial has taken up to 2.00 GB"]


@pytest.mark.parametrize(
    ("gpus", "expected"), [([80], 3), ([80, 80], 6), ([80, 53], 4), ([20], 1), ([20, 20], 2), ([900], 8), ([], 8)]
)
def test_as_many_run_as_fit_on_the_gpus(gpus: list[int], expected: int) -> None:
    # A trial takes 24 GB of a GPU; where GPUs have unequal memory, each gets as many as the smallest has room for.
    machine = Machine(None)
    machine.gpus, machine.gpu = [size * GB for size in gpus], 24 * GB
    result = search(machine)
    assert max(machine.counts) == expected
    assert outcomes(result) == outcomes(search(Machine(None)))
    assert all(trial.gpu_memory_bytes == 24 * GB for trial in result.trials if trial.ended)


def test_a_function_that_uses_no_gpu_is_not_limited_by_it() -> None:
    machine = Machine(100 * GB)
    machine.gpus = [GB]
    search(machine)
    assert max(machine.counts) == 8


def test_nothing_is_limited_where_nothing_is_known() -> None:
    packing = MemoryPacking(SimulatedBackend(lambda _: []), [])
    packing.measure(Memory(GB))
    assert packing.has_room(100)
    assert not packing.is_over(100)


@pytest.mark.slow
def test_the_memory_of_workers_counts_as_available(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "free_bytes", lambda: GB)
    folder = str(tmp_path)

    def function(trial: TrialContext) -> float:
        import time

        block = bytearray(trial["size"])
        block[::4096] = b"x" * len(block[::4096])
        with open(f"{folder}/ready", "w"):
            pass
        while not os.path.exists(f"{folder}/end"):
            time.sleep(0.02)
        return float(len(block))

    size = 100 << 20
    with ProcessBackend(function, 2) as backend:
        assert backend.available_bytes() == GB
        backend.start(Job(0, {"size": size}, tmp_path / "0", 0, None, 0))
        ended: list[Outcome] = []

        class Recorder:
            def report(self, number: int, report: Report, memory: Memory) -> Decision:
                return Decision.CONTINUE

            def ended(self, number: int, outcome: Outcome) -> None:
                ended.append(outcome)

        while not (tmp_path / "ready").exists():
            backend.wait(Recorder(), 0.1)
        available = backend.available_bytes()
        assert available is not None
        assert GB + size < available < GB + size + (300 << 20)
        (tmp_path / "end").touch()
        while not ended:
            backend.wait(Recorder(), 0.1)
        assert ended[0].memory.host > size
    monkeypatch.setattr(processes, "free_bytes", lambda: None)
    with ProcessBackend(function, 2) as backend:
        assert backend.available_bytes() is None


@pytest.mark.slow
def test_processes_never_take_more_than_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    size, limit = 200 << 20, 2
    # Together with the interpreter a trial takes between one and one and a half sizes.
    total = int(size * (limit + 0.9) * 1.2)
    monkeypatch.setattr(processes, "free_bytes", lambda: total)
    monkeypatch.setattr(LocalProcess, "memory_bytes", lambda self: 0)
    counts: list[int] = []

    class CountingBackend(ProcessBackend):
        running = 0

        def start(self, job: Job) -> None:
            self.running += 1
            counts.append(self.running)
            super().start(job)

        def wait(self, handler: Handler, seconds: float | None = None) -> None:
            backend = self

            class Counter:
                def report(self, number: int, report: Report, memory: Memory) -> Decision:
                    return handler.report(number, report, memory)

                def ended(self, number: int, outcome: Outcome) -> None:
                    backend.running -= 1
                    handler.ended(number, outcome)

            super().wait(Counter(), seconds)

    def function(trial: TrialContext) -> None:
        block = bytearray(size)
        block[::4096] = b"x" * len(block[::4096])  # in memory, and not only reserved
        for step in range(trial.start + 1, 4):
            trial.report(step, trial["x"] + 1 / step)

    def search(workers: int) -> TuneResult:
        scheduler = {"name": "successive_halving", "max_resource": 3}
        space = {"x": {"float": [0, 1]}}
        backend = CountingBackend(function, workers)
        return optimize(lambda: backend, space, budget="6 trials", sampler="quasi_random", scheduler=scheduler)

    result = search(3)
    assert max(counts) == limit
    assert all(size < trial.memory_bytes < 1.5 * size for trial in result.trials if trial.ended)
    assert outcomes(result) == outcomes(search(1))
