"""Trials are packed by measured memory: never more than there is, and the study is the same as with one worker."""

import logging
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from posttrain.jobs.local import LocalLauncher
from posttrain.jobs.memory import Memory
from posttrain.jobs.packing import MemoryPacking
from posttrain.jobs.simulated import SimulatedRunner
from posttrain.jobs.task import Handler, Outcome, Task
from posttrain.jobs.workers import WorkerRunner
from posttrain.tune import Space, TuneResult
from posttrain.tune.api import optimize
from posttrain.tune.context import TrialContext
from posttrain.tune.goal import Goal
from posttrain.tune.runs import CurvePoint, RunTrial, open_trials, replay

GB = 10**9
SPACE = {"x": {"float": [0, 1]}, "memory": {"value": 2 * GB}}
HALVING = {"name": "successive_halving", "max_resource": 9}


class Machine(SimulatedRunner):
    """A simulated machine of ``total`` bytes, whose trials take ``memory`` bytes; tells what was in use at a time.

    Each trial takes ``gpu`` bytes of one of its ``gpus``, too.
    """

    def __init__(self, total: int | None, workers: int = 8) -> None:
        def curve(settings: Mapping[str, Any]) -> Iterator[CurvePoint]:
            for step in range(1, 10):
                yield CurvePoint(settings["x"] + 1 / step)

        super().__init__(replay(curve)._play, workers)
        self.total, self.running, self.most, self.runs = total, dict[int, int](), 0, list[int]()
        self.counts: list[int] = []
        self.gpus, self.gpu = list[int](), 0

    def available_bytes(self) -> int | None:
        return self.total

    def gpu_bytes(self) -> list[int]:
        return self.gpus

    def start(self, task: Task) -> None:
        assert task.number not in self.running
        self.running[task.number] = task.argument.settings["memory"]
        self.runs.append(task.number)
        self.counts.append(len(self.running))
        self.most = max(self.most, sum(self.running.values()))
        super().start(task)

    def wait(self, handler: Handler, seconds: float | None = None) -> None:
        machine = self

        class Measured:
            def message(self, number: int, message: Any, memory: Memory) -> Any:
                return handler.message(number, message, Memory(machine.running[number], machine.gpu))

            def ended(self, number: int, outcome: Outcome) -> None:
                memory = Memory(machine.running.pop(number), machine.gpu)
                handler.ended(number, replace(outcome, memory=memory))

        super().wait(Measured(), seconds)  # type: ignore[arg-type]


def search(machine: Machine, space: Any = SPACE, **options: Any) -> TuneResult:
    options = {"budget": "9 trials", "sampler": "quasi_random", "scheduler": HALVING, **options}
    return optimize(lambda: machine, Goal(Space(space)), **options)


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


@pytest.mark.slow
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
                SimulatedRunner.kill(self, 3)
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
    assert lines == ["  memory for 2 at a time: one has taken up to 2.00 GB"]


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
    packing = MemoryPacking(replay(lambda _: []))
    packing.measure(Memory(GB))
    assert packing.has_room(100)
    assert not packing.is_over(100)


@pytest.mark.slow
def test_processes_never_take_more_than_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    size, limit = 200 << 20, 2
    # Together with the interpreter a trial takes between one and one and a half sizes.
    total = int(size * (limit + 0.9) * 1.2)
    monkeypatch.setattr(LocalLauncher, "available_bytes", lambda self, processes: total)
    counts: list[int] = []

    class CountingRunner(WorkerRunner):
        def start(self, task: Task) -> None:
            super().start(task)
            counts.append(len(self._busy))

    def function(trial: TrialContext) -> None:
        block = bytearray(size)
        block[::4096] = b"x" * len(block[::4096])  # in memory, and not only reserved
        for step in range(trial.start + 1, 4):
            trial.report(step, trial["x"] + 1 / step)

    def search(workers: int) -> TuneResult:
        scheduler = {"name": "successive_halving", "max_resource": 3}
        runner = CountingRunner(RunTrial(function), LocalLauncher(), workers)
        return optimize(
            lambda: runner,
            Goal(Space({"x": {"float": [0, 1]}})),
            budget="6 trials",
            sampler="quasi_random",
            scheduler=scheduler,
        )

    result = search(3)
    assert max(counts) == limit
    assert all(size < trial.memory_bytes < 1.5 * size for trial in result.trials if trial.ended)
    assert outcomes(result) == outcomes(search(1))


@pytest.mark.slow
def test_out_of_memory_beside_others_is_run_again(tmp_path: Path) -> None:
    """The second trial finds no memory while the first runs; the third begins after it, and not beside it."""
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

    class UnknownMemory(LocalLauncher):
        def available_bytes(self, processes: object) -> None:
            return None

    space = {"x": {"float": [0, 1]}}
    runner = WorkerRunner(RunTrial(function), UnknownMemory(), 2)
    result = optimize(lambda: runner, Goal(Space(space)), budget="3 trials", sampler="quasi_random")
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
    result = optimize(
        lambda: open_trials("inline", function), Goal(Space(space)), budget="2 trials", sampler="quasi_random"
    )
    trial, other = result.trials
    assert (trial.state, trial.error) == ("failed", "out of memory: CUDA out of memory. Tried to allocate 2.00 GiB")
    assert other.state == "finished"
