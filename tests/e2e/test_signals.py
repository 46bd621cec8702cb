"""A loop that a signal ends says so in one line, and the same command ends as a loop that nothing interrupted."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from loops import Loop


def test_a_signal_stops_the_loop_and_the_same_command_resumes(
    small_loop: Loop, small_reference: dict[str, Any]
) -> None:
    for number, line in ((signal.SIGTERM, "round 1"), (signal.SIGHUP, "round 2")):
        small_loop.log.unlink(missing_ok=True)
        process = small_loop.start()
        while process.is_alive() and not (small_loop.log.exists() and line in small_loop.log.read_text()):
            time.sleep(0.01)
        os.kill(process.pid or 0, number)
        process.join(60)
        log = small_loop.log.read_text()
        assert process.exitcode == 128 + number, log
        assert log.splitlines()[-1] == "stopped; the same command resumes from here"
        assert "Traceback" not in log
    small_loop.finish()
    small_loop.check_store()
    assert {**small_loop.outcome(), "seconds": small_reference["seconds"]} == small_reference


def test_ctrl_c_before_the_command_line_is_imported_prints_nothing(tmp_path: Path) -> None:
    (tmp_path / "typer.py").write_text("import os, signal, time; os.kill(os.getpid(), signal.SIGINT); time.sleep(60)")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-m", "posttrain", "status"]
    process = subprocess.run(command, env=environment, capture_output=True, timeout=60, check=False)
    assert (process.returncode, process.stderr, process.stdout) == (-signal.SIGINT, b"", b"")
