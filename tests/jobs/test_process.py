"""A process ends with all that it has started; commands have limits."""

import sys
import tempfile
import time
from pathlib import Path

import pytest

from posttrain.jobs.process import Completed, ProcessGroup, run_command

CHILD = "sleep 300 & echo $!; "


def is_running(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"


@pytest.mark.parametrize(
    ("end", "code"), [("exit 3", 3), ("kill -9 $$", -9), ("sleep 300", None)], ids=["exit", "killed", "runs"]
)
@pytest.mark.slow
def test_children_end_with_their_process(end: str, code: int | None) -> None:
    with tempfile.TemporaryFile() as log:
        process = ProcessGroup(["bash", "-c", CHILD + end], log)
        try:
            assert process.wait(1 if code is None else 10) == code
            log.seek(0)
            child = int(log.read())
            if code is None:
                assert is_running(child)
                process.kill()
                assert process.wait(10) == -9
            deadline = time.monotonic() + 10
            while is_running(child) and time.monotonic() < deadline:
                time.sleep(0.01)
            assert not is_running(child)
        finally:
            process.kill()


def test_folder_and_environment(tmp_path: Path) -> None:
    with tempfile.TemporaryFile() as log:
        code = ProcessGroup(["bash", "-c", "pwd; echo $NAME"], log, str(tmp_path), {"NAME": "value"}).wait(10)
        log.seek(0)
        assert (code, log.read().decode().split()) == (0, [str(tmp_path), "value"])


def test_a_command_gets_its_input_and_gives_its_output(tmp_path: Path) -> None:
    script = "cat; pwd; echo $NAME; echo of errors >&2; exit 3"
    ended = run_command(["bash", "-c", script], input=b"in\n", folder=str(tmp_path), environment={"NAME": "value"})
    assert ended == Completed(3, f"in\n{tmp_path}\nvalue\n".encode(), b"of errors\n")
    assert ended.last_error == "of errors"
    assert run_command(["true"]).last_error == ""
    with pytest.raises(FileNotFoundError):
        run_command(["no such command"])


@pytest.mark.slow
def test_a_command_is_ended_with_all_that_it_has_started() -> None:
    began = time.monotonic()
    ended = run_command(["bash", "-c", CHILD + "sleep 300"], seconds=1)
    assert ended.code is None
    assert time.monotonic() - began < 10
    child = int(ended.output)
    while is_running(child) and time.monotonic() - began < 20:
        time.sleep(0.01)
    assert not is_running(child)


@pytest.mark.parametrize(
    ("code", "limits"),
    [("while True: pass", {"cpu_seconds": 1}), ("x = bytearray(1 << 30)", {"memory_bytes": 1 << 29})],
)
@pytest.mark.slow
def test_a_command_has_limits(code: str, limits: dict[str, int]) -> None:
    ended = run_command([sys.executable, "-c", f"import time; time.sleep(0.2)\n{code}"], seconds=60, **limits)
    assert ended.code
    assert ended.code < 0 or ended.last_error == "MemoryError"
