"""Runners pass their contract; processes outlive crashes, kills and hangs of tasks; plays are replayed in time."""

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from slurm_cluster import slurm_cluster

from posttrain.jobs.inline import InlineRunner
from posttrain.jobs.launcher import Launcher
from posttrain.jobs.local import LocalLauncher
from posttrain.jobs.memory import Memory
from posttrain.jobs.ray import RayLauncher, RayProcess, start_ray
from posttrain.jobs.simulated import Play, SimulatedRunner
from posttrain.jobs.slurm import SlurmLauncher
from posttrain.jobs.task import Outcome, Task, TaskContext
from posttrain.jobs.workers import WorkerRunner
from posttrain.store.errors import UserError, WorkError
from posttrain.testing.runners import MakeRunner, RecordingHandler, RunnerContract, count_up, run_tasks, show_life
from posttrain.tune import Float, Int, TrialContext, minimize

Launchers = Callable[[], Launcher]


class TestInline(RunnerContract):
    @pytest.fixture
    def make(self) -> MakeRunner:
        return InlineRunner


@pytest.mark.slow
class TestProcesses(RunnerContract):
    @pytest.fixture
    def make(self) -> MakeRunner:
        return lambda function: WorkerRunner(function, LocalLauncher(), 2)


@pytest.fixture(scope="module")
def ray_cluster() -> Iterator[None]:
    """A cluster for all tests that use it, as its start takes seconds."""
    ray, _ = start_ray(4)
    yield
    ray.shutdown()


def ray_launcher() -> Launcher:
    return RayLauncher(2)


@pytest.mark.slow
@pytest.mark.usefixtures("ray_cluster")
class TestRay(RunnerContract):
    @pytest.fixture
    def make(self) -> MakeRunner:
        return lambda function: WorkerRunner(function, ray_launcher(), 2)


@pytest.fixture(scope="module")
def slurm() -> Iterator[None]:
    with slurm_cluster() as config, pytest.MonkeyPatch.context() as patch:
        patch.setenv("SLURM_CONF", str(config))
        yield


@pytest.mark.slow
@pytest.mark.usefixtures("slurm")
class TestSlurm(RunnerContract):
    @pytest.fixture
    def make(self) -> MakeRunner:
        return lambda function: WorkerRunner(function, SlurmLauncher(), 2)


def task(folder: Path, number: int, argument: Any = None) -> Task:
    return Task(number, argument, folder / str(number))


@pytest.mark.slow
@pytest.mark.usefixtures("ray_cluster", "slurm")
@pytest.mark.parametrize("launcher", [LocalLauncher, ray_launcher, SlurmLauncher])
def test_tasks_may_die_and_others_continue(tmp_path: Path, launcher: Launchers) -> None:
    """Each dies as its argument says, in its first run only."""

    # In here, so that it is sent by value: the workers cannot import the tests.
    def function(context: TaskContext) -> float:
        marker = context.folder / "has run"
        how = context.argument
        if marker.exists() or how == "well":
            return 1.0
        marker.touch()
        (context.folder / "pid").write_text(str(os.getpid()))
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "crash":
            print("corrupted size vs. prev_size", flush=True)  # noqa: T201
            os.kill(os.getpid(), signal.SIGSEGV)
        if how == "exit":
            os._exit(7)
        time.sleep(1000)
        raise AssertionError

    kinds = ["kill", "well", "crash", "exit", "well", "hang", "well"]
    handler = RecordingHandler()
    with WorkerRunner(function, launcher(), 2, silence=8.0) as runner:
        run_tasks(runner, [task(tmp_path, number, how) for number, how in enumerate(kinds)], handler)
        outcomes = [handler.outcomes[number][0] for number in range(len(kinds))]
        assert [outcome.kind for outcome in outcomes] == [
            *["killed", "returned", "failed", "failed", "returned", "failed", "returned"]
        ]
        assert outcomes[0].error == "killed by SIGKILL, perhaps as memory ran out"
        assert outcomes[2].error == "crashed by SIGSEGV: corrupted size vs. prev_size"
        assert outcomes[3].error == "ended its process with exit code 7"
        assert outcomes[5].error == "it hangs: silent for 8 s"
        run_tasks(runner, [task(tmp_path, 0, "kill")], handler)
    assert handler.outcomes[0][1].value == 1.0
    for number in (0, 2, 3, 5):
        assert not is_alive(int((tmp_path / str(number) / "pid").read_text()))


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"


def test_a_function_that_cannot_be_pickled(tmp_path: Path) -> None:
    with (tmp_path / "file").open("w") as file:

        def function(context: TaskContext) -> float:
            return float(file.fileno())

        with pytest.raises(UserError, match="function: cannot be sent to another process"):
            WorkerRunner(function, LocalLauncher(), 1)


def play(task: Task) -> Play:
    for step in range(3):
        if not (yield task.argument, step):
            return "stopped"
    return "done"


def test_plays_are_replayed_in_the_order_of_their_times(tmp_path: Path) -> None:
    runner = SimulatedRunner(play, workers=2)
    order: list[tuple[float, int]] = []

    class Handler(RecordingHandler):
        def message(self, number: int, message: Any, memory: Memory) -> Any:
            order.append((runner.clock(), number))
            return super().message(number, message, memory)

    handler = Handler({1: [True, True, False]})
    with runner:
        run_tasks(runner, [task(tmp_path, 0, 2.0), task(tmp_path, 1, 3.0)], handler)
    assert order == [(2, 0), (3, 1), (4, 0), (6, 1), (6, 0), (9, 1)]
    assert handler.messages[0] == [0, 1, 2]
    assert handler.outcomes[0] == [Outcome("returned", "done", seconds=6.0)]
    assert handler.outcomes[1] == [Outcome("returned", "stopped", seconds=9.0)]
    assert runner.clock() == 9
    assert not list(tmp_path.iterdir())


def test_a_simulated_wait_ends_in_time(tmp_path: Path) -> None:
    runner, handler = SimulatedRunner(play), RecordingHandler()
    runner.start(task(tmp_path, 0, 10.0))
    runner.wait(handler, 4.0)
    assert (runner.clock(), handler.messages) == (4.0, {})
    runner.wait(handler, 8.0)
    assert (runner.clock(), len(handler.messages[0])) == (10.0, 1)
    runner.kill(0)
    runner.start(task(tmp_path, 0, 1.0))
    runner.wait(handler)
    assert runner.clock() == 11.0


def test_a_broken_play_is_a_failed_task(tmp_path: Path) -> None:
    def unknown(task: Task) -> Play:
        raise LookupError("no curve was recorded")
        yield 1.0, None

    handler = RecordingHandler()
    run_tasks(SimulatedRunner(unknown), [task(tmp_path, 0)], handler)
    assert handler.outcomes[0] == [Outcome("failed", error="LookupError: no curve was recorded")]


def test_inline_runs_the_function_here(tmp_path: Path) -> None:
    handler = RecordingHandler()
    run_tasks(InlineRunner(count_up), [task(tmp_path, 3, 2)], handler)
    assert (tmp_path / "3" / "state").read_text() == "2 3"
    handler = RecordingHandler(ends=frozenset({0}))
    run_tasks(InlineRunner(show_life), [task(tmp_path, 0), task(tmp_path, 1)], handler)
    assert [handler.outcomes[number][0].value for number in (0, 1)] == [False, True]


@pytest.mark.slow
@pytest.mark.usefixtures("ray_cluster", "slurm")
def test_a_study_is_the_same_on_every_engine(tmp_path: Path) -> None:
    """Populations are synchronous: no answer depends on who is first."""

    def function(trial: TrialContext) -> None:
        path = trial.folder / "state"
        step, value = json.loads(path.read_text()) if path.exists() else (0, 10.0)
        if step:
            trial.report(step, value)
        while step < 4:
            step, value = step + 1, value - trial["x"] * trial["depth"]
            path.write_text(json.dumps([step, value]))
            time.sleep(0.02 * trial["x"])  # they do not end in the order in which they began
            trial.report(step, value)

    def trials(engine: str, workers: int | None = None) -> list[Any]:
        result = minimize(
            function,
            {"x": Float(0, 1), "depth": Int(1, 4)},
            budget="8 trials",
            sampler=None,
            scheduler={"name": "pbt", "max_resource": 4, "population": 4},
            seed=5,
            out=tmp_path / engine,
            engine=engine,
            workers=workers,
        )
        return [
            (trial.settings, trial.state, [(report.step, report.value) for report in trial.reports])
            for trial in result.trials
        ]

    inline = trials("inline")
    assert len({str(state) for _, state, _ in inline}) > 1
    assert trials("processes", 2) == inline
    assert trials("ray", 2) == inline
    assert trials("slurm", 2) == inline


@pytest.mark.slow
@pytest.mark.usefixtures("ray_cluster", "slurm")
@pytest.mark.parametrize("launcher", [ray_launcher, SlurmLauncher])
def test_workers_elsewhere_die_with_the_runner(tmp_path: Path, launcher: Launchers) -> None:
    def function(context: TaskContext) -> float:
        (context.folder / "pid").write_text(str(os.getpid()))
        context.send(1)
        time.sleep(1000)
        raise AssertionError

    with WorkerRunner(function, launcher(), 2) as runner:
        runner.start(task(tmp_path, 0))
        handler = RecordingHandler()
        while not handler.messages:
            runner.wait(handler, 60)
    process = int((tmp_path / "0" / "pid").read_text())
    until = time.monotonic() + 30
    while is_alive(process) and time.monotonic() < until:
        time.sleep(0.05)
    assert not is_alive(process)


def test_a_cluster_that_the_launcher_has_started_ends_after_the_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    ends: list[str] = []
    ray = SimpleNamespace(
        shutdown=lambda: ends.append("cluster"),
        cluster_resources=lambda: {"CPU": 2.0},
        util=SimpleNamespace(get_node_ip_address=lambda: "127.0.0.1"),
    )
    for started in (True, False):
        monkeypatch.setattr("posttrain.jobs.ray.start_ray", lambda count, own=started: (ray, own))
        with WorkerRunner(count_up, RayLauncher(1), 1) as runner:
            runner.callback(lambda: ends.append("workers"))
            assert not ends
        assert ends == ["workers", "cluster"][: 1 + started]
        ends.clear()


@pytest.mark.parametrize("ends", [True, False])
def test_ray_cancels_only_a_worker_that_does_not_end(ends: bool) -> None:
    """Ray may have given the process of a task that has ended to another, which a cancellation would kill."""
    cancelled: list[str] = []
    ray = SimpleNamespace(
        wait=lambda results, timeout: (results if ends and timeout else [], []),
        get=lambda result: (0, ""),
        cancel=lambda result, force: cancelled.append(result),
        exceptions=SimpleNamespace(RayError=OSError),
    )
    RayProcess(ray, "result").kill()
    assert cancelled == ([] if ends else ["result"])


@pytest.mark.slow
def test_a_process_without_the_key_is_refused(tmp_path: Path) -> None:
    """One that guesses, one that stays silent and one with an unknown number hold up no worker."""
    with WorkerRunner(count_up, LocalLauncher(), 1) as runner:
        address = json.loads(runner._listener.address)
        with Client(address):  # sends nothing
            for key in (b"guess", bytes(32)):
                with pytest.raises((AuthenticationError, EOFError, ConnectionError)):
                    Client(address, authkey=key)
            with Client(address, authkey=runner._listener.key) as connection:
                connection.send(99)
                runner.wait(RecordingHandler(), 0.1)
                with pytest.raises(EOFError):
                    connection.recv()
            handler = RecordingHandler()
            run_tasks(runner, [task(tmp_path, 0, 2)], handler)
            assert handler.outcomes[0][0].value == 3


@pytest.mark.slow
def test_slurm_that_refuses(slurm: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SBATCH_PARTITION", "nowhere")
    with pytest.raises(UserError, match="--engine: Slurm refuses jobs: allocation failure: Invalid partition"):
        SlurmLauncher()
    monkeypatch.setenv("PATH", "")
    with pytest.raises(UserError, match="--engine: Slurm's sbatch is not here; run it where jobs are submitted"):
        SlurmLauncher()


def test_a_worker_that_cannot_be_started_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def launch(*arguments: object) -> None:
        raise WorkError("no more processes")

    monkeypatch.setattr(LocalLauncher, "launch", launch)
    with WorkerRunner(count_up, LocalLauncher(), 1) as runner, pytest.raises(WorkError, match="no more processes"):
        runner.start(task(tmp_path, 0, 1))


@pytest.mark.slow
@pytest.mark.parametrize("alive", [True, False])
def test_silence_is_not_hanging_where_a_task_shows_life(alive: bool, tmp_path: Path) -> None:
    def function(context: TaskContext) -> float:
        for _ in range(8):
            time.sleep(0.5)
            if alive:
                context.show_life()
        return 1.0

    handler = RecordingHandler()
    with WorkerRunner(function, LocalLauncher(), 1, silence=2.5) as runner:
        run_tasks(runner, [task(tmp_path, 0)], handler)
    assert handler.outcomes[0][0].kind == ("returned" if alive else "failed")


@pytest.mark.slow
def test_the_memory_of_workers_counts_as_available(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gigabyte, size = 10**9, 100 << 20
    monkeypatch.setattr("posttrain.jobs.local.free_bytes", lambda: gigabyte)
    folder = str(tmp_path)

    def function(context: TaskContext) -> int:
        block = bytearray(context.argument)
        block[::4096] = b"x" * len(block[::4096])
        with open(f"{folder}/ready", "w"):
            pass
        while not os.path.exists(f"{folder}/end"):
            time.sleep(0.02)
        return len(block)

    handler = RecordingHandler()
    with WorkerRunner(function, LocalLauncher(), 2) as runner:
        assert runner.available_bytes() == gigabyte
        runner.start(task(tmp_path, 0, size))
        while not (tmp_path / "ready").exists():
            runner.wait(handler, 0.1)
        available = runner.available_bytes()
        assert available is not None
        assert gigabyte + size < available < gigabyte + size + (300 << 20)
        (tmp_path / "end").touch()
        while not handler.outcomes:
            runner.wait(handler, 0.1)
        assert handler.outcomes[0][0].memory.host > size
        monkeypatch.setattr("posttrain.jobs.local.free_bytes", lambda: None)
        assert runner.available_bytes() is None


@pytest.mark.slow
def test_tasks_are_divided_among_gpus(tmp_path: Path) -> None:
    folder = str(tmp_path)

    def function(context: TaskContext) -> bool:
        gpu = os.environ["CUDA_VISIBLE_DEVICES"]
        with open(f"{folder}/{context.number} {gpu}", "w"):
            pass
        waits = 3 if context.number < 4 else 0  # for as many as that to begin
        while len([name for name in os.listdir(folder) if " " in name]) <= waits:
            time.sleep(0.02)
        return gpu == "7"

    handler = RecordingHandler()
    with WorkerRunner(function, LocalLauncher({"GPU-a": 100, "7": 80}), 4) as runner:
        assert list(runner.gpu_bytes()) == [100, 80]
        tasks = [task(tmp_path, number) for number in range(8)]
        run_tasks(runner, tasks[:4], handler)
        run_tasks(runner, tasks[4:6], handler)  # of four idle workers
        assert len(runner._idle) == 4
        # One after the other all are the first GPU's, as none is busy.
        run_tasks(runner, tasks[6:7], handler)
    assert [handler.outcomes[number][0].value for number in range(7)] == [False, True, False, True, False, True, False]
