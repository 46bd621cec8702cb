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
Walk = Callable[[str, Path], list[tuple[str, list[str]]]]

_PAGES = Path(__file__).parents[2] / "docs"
_FENCE = re.compile(r"^```(sh|text)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


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


@pytest.fixture(scope="session")
def walk(run: Run) -> Walk:
    """``walk(page, folder)``: runs its commands there in order; the outputs that it quotes, each with its untrue lines.

    A quoted line must have been printed by the commands before it.
    """

    def through(page: str, folder: Path) -> list[tuple[str, list[str]]]:
        printed: set[str] = set()
        quoted = []
        for kind, text in _FENCE.findall((_PAGES / page).read_text(encoding="utf-8")):
            if kind == "sh":
                printed = {_shape(line) for line in run(text, folder).splitlines()}
            else:
                quoted.append((text, [line for line in text.splitlines() if _shape(line) not in printed]))
        return quoted

    return through


def _shape(line: str) -> str:
    """A line with its numbers, ids, folders and column widths left out, as these differ between machines."""
    line = re.sub(r"\b([a-z]+)-[0-9a-f]{16}\b", r"\1-ID", line)
    line = re.sub(r"\S+/(?=support/\.posttrain)", "", line)
    return " ".join(re.sub(r"[+-]?\d+(\.\d+)?", "#", line).split())


_OWN = re.compile(r"posttrain [^|&;<>$*`]*")
"""A call that needs no shell."""
