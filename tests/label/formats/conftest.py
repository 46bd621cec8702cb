"""Fresh queues for tests of formats."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from posttrain.label.queue import Queue
from posttrain.label.queue_rows import QueueConfig
from posttrain.store.metadata import Metadata


@pytest.fixture(scope="session")
def empty_database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A database without rows, whose copies need no migrations."""
    path = tmp_path_factory.mktemp("empty") / "db.sqlite"
    Metadata(f"sqlite:///{path}", create=True).close()
    return path


@pytest.fixture
def new_queue(tmp_path: Path, empty_database: Path) -> Iterator[Callable[..., Queue]]:
    """Returns a function that opens the queue of a fresh workspace."""
    opened: list[Metadata] = []

    def open_queue(**settings: Any) -> Queue:
        path = tmp_path / f"{len(opened)}.sqlite"
        shutil.copyfile(empty_database, path)
        opened.append(Metadata(f"sqlite:///{path}"))
        return Queue(opened[-1], QueueConfig(**settings))

    yield open_queue
    for metadata in opened:
        metadata.close()
