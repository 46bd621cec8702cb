"""Commands in processes of their own, forked from a process that has done the slow imports and nothing else.

A module of its own, because such a process imports it by name.
"""

import gc
import multiprocessing
import os
import pkgutil
import runpy
import sys
import time
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

import posttrain

_EXCLUDED = ("posttrain.__main__", "posttrain.store.migrations.env")
_OWN_MODULES = [
    entry.name for entry in pkgutil.walk_packages(posttrain.__path__, "posttrain.") if entry.name not in _EXCLUDED
]
_LIBRARIES = [
    *("alembic.command", "pandas", "pyarrow.dataset", "rensa"),
    *("scipy.optimize", "sklearn.cluster", "sklearn.linear_model", "sklearn.manifold"),
    *("transformers.models.bert.modeling_bert", "transformers.models.llama.modeling_llama"),
]

FORKS = multiprocessing.get_context("forkserver")
"""The one fork server of a test process: what it forks must be in this list."""

FORKS.set_forkserver_preload(["without_gc", *_LIBRARIES, *_OWN_MODULES])


def start(arguments: list[str], folder: Path, log: Path, program: str = "posttrain") -> BaseProcess:
    """Starts a program in a folder, its output added to a file.

    Args:
        arguments: the program's arguments.
        folder: the working directory.
        log: takes standard output and standard error.
        program: ``posttrain``, ``pytest``, or ``python`` with a file as the only argument.
    """
    process = FORKS.Process(target=_run, args=(program, arguments, folder, log))
    process.start()
    return process


def start_gc() -> None:
    """Starts the collection of garbage in a forked process, without what the imports have left in memory."""
    gc.freeze()  # a collection would touch, and so copy, all of it
    gc.enable()


def start_server(root: Path, log: Path, port: int = 0) -> tuple[BaseProcess, str]:
    """Starts ``posttrain serve`` on a workspace; returns the process and the address, once it listens."""
    log.unlink(missing_ok=True)
    process = start(["serve", "-w", str(root), "--port", str(port)], root, log)
    while "listening on" not in (text := log.read_text() if log.exists() else ""):
        assert process.is_alive(), text
        time.sleep(0.05)
    return process, text.split("listening on ")[1].split()[0]


def _run(program: str, arguments: list[str], folder: Path, log: Path) -> None:
    start_gc()
    with log.open("ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.environ["COLUMNS"] = "120"
    os.chdir(folder)
    if program == "posttrain":
        from posttrain.cli.main import main

        main(arguments)
        return
    sys.path.insert(0, str(folder))  # as `python -m pytest` and `python -` have it
    if program == "pytest":
        sys.exit(pytest.main(arguments))
    runpy.run_path(arguments[0], run_name="__main__")
