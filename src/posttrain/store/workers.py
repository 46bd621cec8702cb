"""The processes that work in a workspace: many at a time, or one that excludes the others.

A worker holds a lock file of its own in ``.posttrain/workers`` for as long as it works. The kernel releases the lock
when the process dies, however it dies: a run whose worker's lock is free was interrupted.
"""

import uuid
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from posttrain.store.errors import LockedError
from posttrain.store.files import describe_holder, disk_errors, hold_lock, make_folder

WORK = "work"
"""Name of the lock in a server's database that workers share."""

_SUFFIX = ".lock"

# Seconds to wait until another process has joined, or has looked who works.
_ADMISSION_SECONDS = 60


@contextmanager
def exclude_workers(home: Path) -> Iterator[None]:
    """Keeps other processes from working in a workspace.

    Args:
        home: The workspace's ``.posttrain``.

    Raises:
        LockedError: another process works in it; names its id, its host and since when.
    """
    with ExitStack() as held:
        with _admission(home):
            held.enter_context(hold_lock(home / "lock"))
            if path := next((path for path in _lock_files(home) if _is_held(path)), None):
                what = f"another posttrain works in this workspace ({describe_holder(path)})"
                raise LockedError(what, where=str(home.parent), fix="wait for it to end, or end it")
        yield


@contextmanager
def join_workers(home: Path) -> Iterator[str]:
    """Adds this process to the workers, and removes the lock files of killed ones; yields the worker's id.

    Raises:
        LockedError: a process excludes workers.
    """
    id = uuid.uuid4().hex
    with ExitStack() as held:
        with _admission(home), hold_lock(home / "lock"):
            make_folder(home / "workers")
            for path in _lock_files(home):
                if not _is_held(path):
                    _remove(path)
            path = _lock_file(home, id)
            held.callback(_remove, path)  # after the release: nobody else locks a worker's file
            held.enter_context(hold_lock(path))
        yield id


def is_working(home: Path, id: str) -> bool:
    """Returns whether the worker's process lives on this host."""
    path = _lock_file(home, id)
    return path.exists() and _is_held(path)


def _admission(home: Path) -> AbstractContextManager[None]:
    """Locks the set of workers, for moments only."""
    return hold_lock(home / "lock.admission", wait=_ADMISSION_SECONDS)


def _lock_file(home: Path, id: str) -> Path:
    return home / "workers" / f"{id}{_SUFFIX}"


def _lock_files(home: Path) -> list[Path]:
    return sorted((home / "workers").glob(f"*{_SUFFIX}"))


def _is_held(path: Path) -> bool:
    lock = FileLock(path, timeout=0, thread_local=False)
    with disk_errors(path):
        try:
            lock.acquire()
        except Timeout:
            return True
        lock.release()
    return False


def _remove(path: Path) -> None:
    for file in (path, path.with_name(f"{path.name}.json")):
        file.unlink(missing_ok=True)
