"""A process ends with all that it has started."""

import tempfile
import time
from pathlib import Path

import pytest

from posttrain.jobs.process_group import ProcessGroup

CHILD = "sleep 300 & echo $!; "


def is_running(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"


@pytest.mark.parametrize(
    ("end", "code"), [("exit 3", 3), ("kill -9 $$", -9), ("sleep 300", None)], ids=["exit", "killed", "runs"]
)
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
