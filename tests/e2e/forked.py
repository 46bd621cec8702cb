"""Commands in processes of their own, forked from one that has imported what takes seconds, and no more than that.

In a module of its own, as such a process has to find it by name.
"""

import multiprocessing
import os
import pkgutil
from multiprocessing.process import BaseProcess
from pathlib import Path

import posttrain

_NOT_IMPORTED = ("posttrain.__main__", "posttrain.store.migrations.env")
_OURS = [
    entry.name for entry in pkgutil.walk_packages(posttrain.__path__, "posttrain.") if entry.name not in _NOT_IMPORTED
]
_THEIRS = ["pyarrow.dataset", "sklearn.cluster", "sklearn.manifold", "transformers.models.llama.modeling_llama"]

_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload([*_THEIRS, *_OURS])


def start(arguments: list[str], folder: Path, log: Path) -> BaseProcess:
    """``posttrain ARGUMENTS`` in a folder, its output added to a file."""
    process = _FORKS.Process(target=_run, args=(arguments, folder, log))
    process.start()
    return process


def _run(arguments: list[str], folder: Path, log: Path) -> None:
    from posttrain.cli.main import main

    with log.open("ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.environ["COLUMNS"] = "120"
    os.chdir(folder)
    main(arguments)
