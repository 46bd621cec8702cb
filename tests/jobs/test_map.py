"""Every engine gives the same results in the same order, and reports errors."""

import operator
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from posttrain.data.versions.named_build import parse_version
from posttrain.jobs.map import Engine, open_engine
from posttrain.store.errors import UserError, WorkError


class EngineContract:
    """The functions come from modules that every worker can import."""

    @pytest.fixture
    def engine(self) -> Iterator[Engine]:
        raise NotImplementedError

    def test_results_come_in_order(self, engine: Engine) -> None:
        assert list(engine.map(operator.neg, range(20))) == [-number for number in range(20)]

    def test_no_items_give_no_results(self, engine: Engine) -> None:
        assert list(engine.map(operator.neg, [])) == []

    def test_an_error_of_a_worker_is_raised_unchanged(self, engine: Engine) -> None:
        with pytest.raises(UserError, match=r"^--version: `two` is not a semantic version; such as 2\.3\.1$") as error:
            list(engine.map(parse_version, ["1.0.0", "two", "three", "4.0.0"]))
        assert error.value.where == "--version"
        assert list(engine.map(operator.neg, [5])) == [-5], "the engine stays usable"


class TestInline(EngineContract):
    @pytest.fixture
    def engine(self) -> Iterator[Engine]:
        with open_engine("inline") as engine:
            yield engine


@pytest.mark.slow
class TestProcesses(EngineContract):
    @pytest.fixture
    def engine(self) -> Iterator[Engine]:
        with open_engine("processes", 2) as engine:
            yield engine

    def test_a_killed_worker_raises(self) -> None:
        with open_engine("processes", 1) as engine, pytest.raises(WorkError, match="a worker process was killed"):
            list(engine.map(os._exit, [9, 9]))

    @pytest.mark.slow
    def test_after_an_error_no_task_runs(self, engine: Engine, tmp_path: Path) -> None:
        slow_commands = [["sh", "-c", f"sleep 0.5; touch {tmp_path / str(number)}"] for number in range(4)]
        with pytest.raises(subprocess.CalledProcessError):
            list(engine.map(subprocess.check_call, [["false"], *slow_commands]))
        files = sorted(tmp_path.iterdir())
        time.sleep(0.8)
        assert sorted(tmp_path.iterdir()) == files


@pytest.fixture(scope="module")
def ray() -> Iterator[Engine]:
    """Started once, because that takes seconds."""
    with open_engine("ray", 2) as engine:
        yield engine


@pytest.mark.slow
class TestRay(EngineContract):
    @pytest.fixture
    def engine(self, ray: Engine) -> Engine:  # type: ignore[override]
        return ray

    def test_a_signal_still_ends_the_process_as_before(self, engine: Engine) -> None:
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_an_unknown_engine_raises() -> None:
    with pytest.raises(UserError, match="there is no engine `spark`"):
        open_engine("spark")  # type: ignore[arg-type]
    with pytest.raises(UserError, match="--workers: must be at least 1, got 0"):
        open_engine("processes", 0)


SCRIPT = """
import time
from posttrain.jobs.map import open_engine

with open_engine("processes", 2) as engine:
    try:
        print("started", flush=True)
        list(engine.map(time.sleep, [60] * 8))
    except KeyboardInterrupt:
        print("interrupted")
"""


@pytest.mark.parametrize("delay", [0.0, 0.2, 0.8])
@pytest.mark.slow
def test_ctrl_c_ends_workers_without_output(delay: float) -> None:
    program = subprocess.Popen(
        [sys.executable, "-c", SCRIPT],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert program.stdout is not None
    assert program.stdout.readline() == "started\n"
    time.sleep(delay)
    os.killpg(program.pid, signal.SIGINT)
    out, err = program.communicate(timeout=30)
    assert (out, err, program.returncode) == ("interrupted\n", "", 0)
