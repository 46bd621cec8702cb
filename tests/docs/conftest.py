"""Runs the commands of a page."""

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import forked
import pytest
from text_models import specialists, text_workspace

__all__ = ["specialists", "text_workspace"]

Run = Callable[[str, Path], str]
Walk = Callable[[str, Path], list[tuple[str, list[str]]]]

_PAGES = Path(__file__).parents[2] / "docs"
_FENCE = re.compile(r"^```(sh|text)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """``run(commands, folder)``: the output of the commands in a folder; all must exit with 0.

    A call of `posttrain`, or of `python` with the code below it, runs in a forked process that has its imports already,
    any other line in a shell.
    """
    log = tmp_path_factory.mktemp("commands") / "output"
    script = log.with_name("script.py")
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "COLUMNS": "120",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }

    def shell(commands: str, folder: Path) -> tuple[int, str]:
        process = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", commands],
            cwd=folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        return process.returncode, process.stdout

    def call(arguments: list[str], folder: Path, program: str) -> tuple[int | None, str]:
        log.write_bytes(b"")
        process = forked.start(arguments, folder, log, program)
        process.join()
        return process.exitcode, log.read_text(encoding="utf-8")

    def run_line(line: str, folder: Path) -> tuple[int | None, str]:
        if _WITHOUT_SHELL.fullmatch(line):
            return call(shlex.split(line)[1:], folder, "posttrain")
        if code := _PYTHON.fullmatch(line):
            script.write_text(code[1], encoding="utf-8")
            return call([str(script)], folder, "python")
        return shell(line, folder)

    def run_lines(commands: str, folder: Path) -> str:
        output = ""
        lines = [commands] if "<<" in commands else commands.replace("\\\n", " ").splitlines()
        for line in lines:
            code, text = run_line(line, folder)
            output += text
            assert code == 0, f"{line}\n{output}"
        return output

    return run_lines


@pytest.fixture(scope="session")
def walk(run: Run) -> Walk:
    """``walk(page, folder)``: runs the page's commands in order; returns its quoted outputs with their wrong lines.

    A quoted line is wrong if the commands before it did not print it.
    """

    def run_page(page: str, folder: Path) -> list[tuple[str, list[str]]]:
        output_lines: set[str] = set()
        quoted = []
        for kind, text in _FENCE.findall((_PAGES / page).read_text(encoding="utf-8")):
            if kind == "sh":
                output_lines = {_shape(line) for line in run(text, folder).splitlines()}
            else:
                quoted.append((text, [line for line in text.splitlines() if _shape(line) not in output_lines]))
        return quoted

    return run_page


def _shape(line: str) -> str:
    """A line without its numbers, ids, folders and column widths, as these differ between machines."""
    line = re.sub(r"\b([a-z]+)-[0-9a-f]{16}\b", r"\1-ID", line)
    line = re.sub(r"\S+/(?=support/\.posttrain)", "", line)
    return " ".join(re.sub(r"[+-]?\d+(\.\d+)?", "#", line).split())


_WITHOUT_SHELL = re.compile(r"posttrain [^|&;<>$*`]*")
"""A call that needs no shell."""

_PYTHON = re.compile(r"python - <<'EOF'\n(.*\n)EOF\n", re.DOTALL)
"""Code for `python`."""
