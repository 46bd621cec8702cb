"""A loop to kill, and what it ends in when nobody does."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock
from loops import Loop


def _demo(base: Path) -> Loop:
    return Loop(base / "demo", ["demo", "--quick", "--dir", "demo"], lambda folder: None)


def _small(base: Path, workspaces: Any) -> Loop:
    # The champion is asked less than the pool, so that all passes over the pool have something to do.
    select = {"pool_sample": 15}
    return Loop(base / "small", ["run", "-w", "small"], lambda folder: workspaces(base)(folder.name, select=select))


@pytest.fixture
def demo(tmp_path: Path) -> Loop:
    """`posttrain demo --quick`."""
    return _demo(tmp_path)


@pytest.fixture
def small_loop(tmp_path: Path, small_anywhere: Any) -> Loop:
    """`posttrain run` with two rounds of a second or two."""
    return _small(tmp_path, small_anywhere)


@pytest.fixture(scope="session")
def demo_reference(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return _uninterrupted(tmp_path_factory, "demo", _demo)


@pytest.fixture(scope="session")
def small_reference(tmp_path_factory: pytest.TempPathFactory, small_anywhere: Any) -> dict[str, Any]:
    return _uninterrupted(tmp_path_factory, "small", lambda base: _small(base, small_anywhere))


def _uninterrupted(factory: pytest.TempPathFactory, name: str, loop: Callable[[Path], Loop]) -> dict[str, Any]:
    """The outcome of the command when nobody interrupts it, and its ``seconds``; one for all workers."""
    base = factory.getbasetemp()
    run = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    output = run / f"{name} reference.json"
    with FileLock(run / f"{name} reference.lock"):
        if not output.exists():
            whole = loop(factory.mktemp(name))
            whole.finish()
            whole.check_the_store()
            output.write_text(json.dumps({**whole.outcome(), "seconds": whole.seconds()}))
    result: dict[str, Any] = json.loads(output.read_text())
    return result
