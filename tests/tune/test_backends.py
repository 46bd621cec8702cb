"""Backends pass their contract; processes outlive crashes, kills and hangs of trials; curves are replayed in time."""

import json
import os
import signal
import time
from collections.abc import Iterator
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from slurm_cluster import slurm_cluster

from posttrain.jobs.engines import start_ray
from posttrain.store.errors import UserError, WorkError
from posttrain.testing.backends import BackendContract, MakeBackend, RecordingHandler, count_up, run_jobs, show_life
from posttrain.tune import Float, Int, minimize
from posttrain.tune.backends.base import Job
from posttrain.tune.backends.connected import ConnectedBackend
from posttrain.tune.backends.inline import InlineBackend
from posttrain.tune.backends.processes import ProcessBackend
from posttrain.tune.backends.ray_cluster import RayBackend, RayProcess
from posttrain.tune.backends.simulated import CurvePoint, SimulatedBackend
from posttrain.tune.backends.slurm import SlurmBackend
from posttrain.tune.context import TrialContext
from posttrain.tune.schedulers.base import Decision
from posttrain.tune.trial import Memory


class TestInline(BackendContract):
    @pytest.fixture
    def make(self) -> MakeBackend:
        return InlineBackend


@pytest.mark.slow
class TestProcesses(BackendContract):
    @pytest.fixture
    def make(self) -> MakeBackend:
        return lambda function: ProcessBackend(function, 2)


@pytest.fixture(scope="module")
def ray_cluster() -> Iterator[None]:
    """A cluster for all tests that use it, as its start takes seconds."""
    ray, _ = start_ray(4)
    yield
    ray.shutdown()


@pytest.mark.slow
@pytest.mark.usefixtures("ray_cluster")
class TestRay(BackendContract):
    @pytest.fixture
    def make(self) -> MakeBackend:
        return lambda function: RayBackend(function, 2)


@pytest.fixture(scope="module")
def slurm() -> Iterator[None]:
    with slurm_cluster() as config, pytest.MonkeyPatch.context() as patch:
        patch.setenv("SLURM_CONF", str(config))
        yield


@pytest.mark.slow
@pytest.mark.usefixtures("slurm")
class TestSlurm(BackendContract):
    @pytest.fixture
    def make(self) -> MakeBackend:
        return lambda function: SlurmBackend(function, 2)


def job(folder: Path, number: int, **settings: object) -> Job:
    return Job(number, settings, folder / str(number), 0, None, number)


@pytest.mark.slow
@pytest.mark.usefixtures("ray_cluster", "slurm")
@pytest.mark.parametrize("backend_class", [ProcessBackend, RayBackend, SlurmBackend])
def test_trials_may_die_and_others_go_on(tmp_path: Path, backend_class: type[ConnectedBackend]) -> None:
    """Each dies as ``how`` says, in its first run only."""

    # In here, so that it is sent by value: the workers cannot import the tests.
    def function(trial: TrialContext) -> float:
        marker = trial.folder / "has run"
        how = trial["how"]
        if marker.exists() or how == "well":
            return 1.0
        marker.touch()
        (trial.folder / "pid").write_text(str(os.getpid()))
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
    with backend_class(function, 2, silence=8.0) as backend:
        run_jobs(backend, [job(tmp_path, number, how=how) for number, how in enumerate(kinds)], handler)
        outcomes = [handler.outcomes[number][0] for number in range(len(kinds))]
        assert [outcome.kind for outcome in outcomes] == [
            *["killed", "returned", "failed", "failed", "returned", "failed", "returned"]
        ]
        assert outcomes[0].error == "killed by SIGKILL, perhaps as memory ran out"
        assert outcomes[2].error == "crashed by SIGSEGV: corrupted size vs. prev_size"
        assert outcomes[3].error == "ended its process with exit code 7"
        assert outcomes[5].error == "it hangs: no report for 8s"
        run_jobs(backend, [job(tmp_path, 0, how="kill")], handler)
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

        def function(trial: TrialContext) -> float:
            return float(file.fileno())

        with pytest.raises(UserError, match="function: cannot be sent to another process"):
            ProcessBackend(function, 1)


def curve(settings: object) -> list[CurvePoint]:
    return [CurvePoint(10.0 - step, seconds=settings["seconds"], tokens=5) for step in range(3)]  # type: ignore[index]


def test_curves_are_replayed_in_the_order_of_their_times(tmp_path: Path) -> None:
    backend = SimulatedBackend(curve, workers=2)
    order: list[tuple[float, int]] = []

    class Handler(RecordingHandler):
        def report(self, number: int, report: object, memory: Memory) -> Decision:
            order.append((backend.clock(), number))
            return super().report(number, report, memory)  # type: ignore[arg-type]

    handler = Handler()
    with backend:
        run_jobs(backend, [job(tmp_path, 0, seconds=2.0), job(tmp_path, 1, seconds=3.0)], handler)
    assert order == [(2, 0), (3, 1), (4, 0), (6, 1), (6, 0), (9, 1)]
    assert [report.value for report in handler.reports[0]] == [10, 9, 8]
    assert (handler.outcomes[1][0].seconds, handler.outcomes[1][0].tokens) == (9, 15)
    assert backend.clock() == 9
    assert not list(tmp_path.iterdir())


def test_a_simulated_trial_goes_on_after_a_pause_and_in_a_later_session(tmp_path: Path) -> None:
    handler = RecordingHandler({0: [Decision.PAUSE]})
    for backend in (SimulatedBackend(curve), SimulatedBackend(curve)):
        run_jobs(backend, [job(tmp_path, 0, seconds=1.0)], handler)
        start = handler.reports[0][-1].step
        run_jobs(backend, [Job(0, {"seconds": 1.0}, tmp_path, start, None, 0)], handler)
        assert [report.step for report in handler.reports[0]] == [1, 2, 3]
        handler.reports.clear()
        handler.decisions[0] = [Decision.PAUSE]
    run_jobs(SimulatedBackend(curve), [Job(0, {"seconds": 1.0}, tmp_path, 2, None, 0)], handler)
    assert [(report.step, report.value) for report in handler.reports[0]] == [(3, 8)]


def test_a_simulated_wait_ends_in_time(tmp_path: Path) -> None:
    backend, handler = SimulatedBackend(curve), RecordingHandler()
    backend.start(job(tmp_path, 0, seconds=10.0))
    backend.wait(handler, 4.0)
    assert (backend.clock(), handler.reports) == (4.0, {})
    backend.wait(handler, 8.0)
    assert (backend.clock(), len(handler.reports[0])) == (10.0, 1)


def test_a_broken_curve_is_a_failed_trial(tmp_path: Path) -> None:
    def unknown(settings: object) -> list[CurvePoint]:
        raise LookupError(f"no curve was recorded with {settings}")

    handler = RecordingHandler()
    run_jobs(SimulatedBackend(unknown), [job(tmp_path, 0, x=1)], handler)
    assert handler.outcomes[0][0].error == "LookupError: no curve was recorded with {'x': 1}"


def test_inline_runs_the_function_here(tmp_path: Path) -> None:
    handler = RecordingHandler()
    run_jobs(InlineBackend(count_up), [job(tmp_path, 3, steps=2)], handler)
    assert (tmp_path / "3" / "state").read_text() == "2 3"
    handler = RecordingHandler(ends=frozenset({0}))
    run_jobs(InlineBackend(show_life), [job(tmp_path, 0), job(tmp_path, 1)], handler)
    assert [handler.outcomes[number][0].kind for number in (0, 1)] == ["interrupted", "returned"]


@pytest.mark.slow
@pytest.mark.usefixtures("ray_cluster", "slurm")
def test_a_study_is_the_same_on_every_engine(tmp_path: Path) -> None:
    """Populations are synchronous: no answer hangs on who is first."""

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
@pytest.mark.parametrize("backend_class", [RayBackend, SlurmBackend])
def test_workers_elsewhere_die_with_the_backend(tmp_path: Path, backend_class: type[ConnectedBackend]) -> None:
    def function(trial: TrialContext) -> float:
        (trial.folder / "pid").write_text(str(os.getpid()))
        trial.report(1, 0.0)
        time.sleep(1000)
        raise AssertionError

    with backend_class(function, 2) as backend:
        backend.start(job(tmp_path, 0))
        handler = RecordingHandler()
        while not handler.reports:
            backend.wait(handler, 60)
    process = int((tmp_path / "0" / "pid").read_text())
    until = time.monotonic() + 30
    while is_alive(process) and time.monotonic() < until:
        time.sleep(0.05)
    assert not is_alive(process)


def test_a_cluster_that_the_backend_has_started_ends_after_the_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    ends: list[str] = []
    ray = SimpleNamespace(
        shutdown=lambda: ends.append("cluster"),
        cluster_resources=lambda: {"CPU": 2.0},
        util=SimpleNamespace(get_node_ip_address=lambda: "127.0.0.1"),
    )
    for started in (True, False):
        monkeypatch.setattr("posttrain.tune.backends.ray_cluster.start_ray", lambda count, own=started: (ray, own))
        with RayBackend(count_up, 1) as backend:
            backend.callback(lambda: ends.append("workers"))
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


def test_a_process_without_the_key_is_refused(tmp_path: Path) -> None:
    """One that guesses, one that stays silent and one with an unknown number hold up no worker."""
    with ProcessBackend(count_up, 1) as backend:
        address = json.loads(backend._listener.address)
        with Client(address):  # sends nothing
            for key in (b"guess", bytes(32)):
                with pytest.raises((AuthenticationError, EOFError, ConnectionError)):
                    Client(address, authkey=key)
            with Client(address, authkey=backend._listener.key) as connection:
                connection.send(99)
                backend.wait(RecordingHandler(), 0.1)
                with pytest.raises(EOFError):
                    connection.recv()
            handler = RecordingHandler()
            run_jobs(backend, [job(tmp_path, 0, steps=2)], handler)
            assert handler.outcomes[0][0].value == 3


@pytest.mark.slow
def test_slurm_that_refuses(slurm: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SBATCH_PARTITION", "nowhere")
    with pytest.raises(UserError, match="--engine: Slurm refuses jobs: allocation failure: Invalid partition"):
        SlurmBackend(count_up, 1)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(UserError, match="--engine: Slurm's sbatch is not here; run it where jobs are submitted"):
        SlurmBackend(count_up, 1)


def test_a_worker_that_cannot_be_started_ends_the_study(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def launch(*arguments: object) -> None:
        raise WorkError("no more processes")

    monkeypatch.setattr(ProcessBackend, "launch", launch)
    with pytest.raises(WorkError, match="no more processes"):
        minimize(count_up, {"x": Float(0, 1)}, budget=2, engine="processes", workers=1, out=tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("alive", [True, False])
def test_silence_is_no_hanging_where_a_trial_shows_life(alive: bool, tmp_path: Path) -> None:
    def function(trial: TrialContext) -> float:
        for _ in range(8):
            time.sleep(0.5)
            if alive:
                trial.show_life()
        return 1.0

    handler = RecordingHandler()
    with ProcessBackend(function, 1, silence=2.5) as backend:
        run_jobs(backend, [job(tmp_path, 0)], handler)
    assert handler.outcomes[0][0].kind == ("returned" if alive else "failed")
