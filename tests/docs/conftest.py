"""How the commands of a page are run."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

Run = Callable[[str, Path], str]


@pytest.fixture(scope="session")
def run() -> Run:
    """``run(commands, folder)``: what a shell there prints; all must end well."""
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "COLUMNS": "120",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }

    def call(commands: str, folder: Path) -> str:
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", commands],
            cwd=folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        assert done.returncode == 0, f"{commands}\n{done.stdout}"
        return done.stdout

    return call
