"""A loop to kill, and the outcome of the same loop without kills."""

import json
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock
from loops import Loop


def _small(base: Path, workspaces: Any) -> Loop:
    # The champion scores fewer records than the pool holds, so that every pass over the pool has work to do.
    changes = {"select": {"pool_sample": 15}, "evaluate": {"latency": {"prompts": 2, "repeats": 1}}}
    return Loop(base / "small", ["run", "-w", "small"], lambda folder: workspaces(base)(folder.name, **changes))


@pytest.fixture
def demo(tmp_path: Path) -> Loop:
    """`posttrain demo --quick`."""
    return Loop(tmp_path / "demo", ["demo", "--quick", "--dir", "demo"], lambda folder: None)


@pytest.fixture
def small_loop(tmp_path: Path, small_anywhere: Any) -> Loop:
    """`posttrain run` with two rounds of a second or two."""
    return _small(tmp_path, small_anywhere)


@pytest.fixture(scope="session")
def small_reference(run_folder: Path, tmp_path_factory: pytest.TempPathFactory, small_anywhere: Any) -> dict[str, Any]:
    """The outcome of the small loop without interruptions, and its ``seconds``; computed once for all workers."""
    output = run_folder / "small reference.json"
    with FileLock(run_folder / "small reference.lock"):
        if not output.exists():
            reference = _small(tmp_path_factory.mktemp("small"), small_anywhere)
            reference.finish()
            reference.check_store()
            output.write_text(json.dumps({**reference.outcome(), "seconds": reference.seconds()}))
    result: dict[str, Any] = json.loads(output.read_text())
    return result
