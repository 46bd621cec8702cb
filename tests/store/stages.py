"""A stage with little work."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from posttrain.store.stage_runner import run_stage
from posttrain.store.workspace import Workspace


def fill(out: Path, scratch: Path) -> Mapping[str, Any]:
    (out / "inner").mkdir()
    (out / "a.txt").write_text("a")
    (out / "inner" / "b.txt").write_text("b")
    return {"n": 2}


def run(workspace: Workspace, work: Callable[[Path, Path], Mapping[str, Any]] = fill, **changes: Any) -> Any:
    defaults = {"kind": "dataset", "inputs": {}, "config": {"x": 1}, "seed": 0, "round": 0, "work": work}
    return run_stage(workspace, "collect", 1, **{**defaults, **changes})
