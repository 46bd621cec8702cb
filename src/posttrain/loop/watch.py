"""Watches what a waiting loop waits for: answers in the queue, files of records and labels, feedback."""

import time
from pathlib import Path
from typing import Any

from posttrain.label.queue import Queue
from posttrain.loop.config import Config
from posttrain.store.config import CONFIG_FILE
from posttrain.store.paths import locate_path
from posttrain.store.workspace import Workspace

_SECONDS = 2.0

_LONGEST = 600.0
"""Seconds after which the loop looks again without a change: triggers may depend on the time."""


def watched_state(workspace: Workspace, config: Config) -> dict[str, Any]:
    """Returns the state that a waiting loop may go on from; it is compared, and nothing else.

    Taken before the loop runs: what changes while it runs then counts as a change.
    """
    root = workspace.root
    names = [CONFIG_FILE, *config.data.files, *([config.label.file] if config.label.file else [])]
    files = [locate_path(root, name) for name in names]
    files += [*sorted((root / "labels").glob("*.csv")), *sorted((workspace.home / "inbox").glob("segments/*"))]
    queue = Queue(workspace.metadata, config.label.queue)
    # Not every answer: each time that the loop looks it reads the pool again.
    decided = [
        batch.name
        for batch in queue.batches("open")
        if (progress := queue.progress(batch.name)).resolved == progress.items
    ]
    return {"files": {str(path): _stamp(path) for path in files}, "decided": decided}


def wait_for_change(
    root: Path, config: Config, before: dict[str, Any], *, seconds: float = _SECONDS, longest: float = _LONGEST
) -> None:
    """Returns once the watched state differs from ``before``, or after a while.

    The workspace is opened and closed each time, so that nothing is held while nothing happens.

    Args:
        root: The workspace's folder.
        config: Its config.
        before: State of before the loop ran.
        seconds: Seconds between two looks.
        longest: Seconds after which it returns without a change.
    """
    end = time.monotonic() + longest
    while time.monotonic() < end:
        with Workspace.open(root, config.store, write=False) as workspace:
            if watched_state(workspace, config) != before:
                return
        time.sleep(seconds)


def _stamp(path: Path) -> tuple[int, int] | None:
    """Returns size and time of a file or folder; None if it is missing."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_size, status.st_mtime_ns
