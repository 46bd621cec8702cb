"""How the commands of a page are run."""

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import forked
import pytest

Run = Callable[[str, Path], str]


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """``run(commands, folder)``: what they print there; all must end well.

    A call of `posttrain` is made in a process that need not import everything anew, any other line by a shell.
    """
    log = tmp_path_factory.mktemp("commands") / "printed"
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "COLUMNS": "120",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }

    def shell(commands: str, folder: Path) -> tuple[int, str]:
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", commands],
            cwd=folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        return done.returncode, done.stdout

    def own(command: str, folder: Path) -> tuple[int | None, str]:
        log.write_bytes(b"")
        process = forked.start(shlex.split(command)[1:], folder, log)
        process.join()
        return process.exitcode, log.read_text(encoding="utf-8")

    def call(commands: str, folder: Path) -> str:
        printed = ""
        lines = [commands] if "<<" in commands else commands.replace("\\\n", " ").splitlines()
        for line in lines:
            code, said = (own if _OWN.fullmatch(line) else shell)(line, folder)
            printed += said
            assert code == 0, f"{line}\n{printed}"
        return printed

    return call


_OWN = re.compile(r"posttrain [^|&;<>$*`]*")
"""A call that needs no shell."""
