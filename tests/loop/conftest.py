"""A loop that reads its config again at every run, and an empty store."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from open_loops import (
    begun_loop,
    copied_loop,
    evaluated_loop,
    evaluated_workspace,
    finished_loop,
    loop_class,
    open_loop,
    quick,
    written_loop,
)
from text_models import specialists, text_workspace
from tune_records import HELD_OUT

from posttrain.store.workspace import Workspace

__all__ = [
    "begun_loop",
    "copied_loop",
    "evaluated_loop",
    "evaluated_workspace",
    "finished_loop",
    "loop_class",
    "open_loop",
    "quick",
    "specialists",
    "text_workspace",
    "written_loop",
]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Workspace]:
    """A workspace in which nothing has run."""
    with Workspace.create(tmp_path / "workspace") as store:
        yield store


@pytest.fixture
def held_out_folder(tmp_path: Path) -> Path:
    """A folder with the file of held-out records."""
    held_out = [
        {"prompt": row["prompt"][-1]["content"], "completion": row["completion"]} for row in HELD_OUT.to_pylist()
    ]
    (tmp_path / "held.jsonl").write_text("".join(json.dumps(row) + "\n" for row in held_out))
    return tmp_path
