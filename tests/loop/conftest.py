"""A loop that reads its config again at every run, and an empty store."""

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
