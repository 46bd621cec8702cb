"""Locks a file for one process at a time; the kernel releases it when the process dies, however it dies."""

import json
import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from posttrain.store.database import utc_now
from posttrain.store.errors import UserError
from posttrain.store.files import disk_errors, write_atomically


@contextmanager
def hold_lock(
    path: Path, *, wait: float = 0, busy_message: str = "another posttrain works in this workspace"
) -> Iterator[None]:
    """Holds the lock file ``path`` and names its holder in a file of the same name with ``.json``.

    Args:
        wait: Seconds to wait for another process to let go.
        busy_message: Text of the error if it does not let go.

    Raises:
        UserError: another process holds it; names its id, its host and since when.
    """
    # Not bound to this thread, as a release by another one would do nothing.
    lock = FileLock(path, timeout=wait, thread_local=False)
    # Beside the lock, not in it: Windows lets nobody read a locked file, and the holder's name is for the others.
    note = path.with_name(f"{path.name}.json")
    try:
        with disk_errors(path):
            lock.acquire()
    except Timeout:
        raise UserError(
            f"{busy_message} ({_holder(note)})",
            where=str(path.parent.parent),
            fix="wait for it to end, or end it",
        ) from None
    try:
        # Of holders that were killed while they wrote their note; only the holder writes one.
        for unfinished in note.parent.glob(f".{note.name}.*"):
            unfinished.unlink(missing_ok=True)
        holder = {"pid": os.getpid(), "host": platform.node(), "since": utc_now().isoformat(timespec="seconds")}
        write_atomically(note, json.dumps(holder).encode())
        yield
    finally:
        # In this order: after the release the note could already be the next holder's.
        note.unlink(missing_ok=True)
        lock.release()


def _holder(note: Path) -> str:
    try:
        holder = json.loads(note.read_bytes())
        return f"process {holder['pid']} on {holder['host']} since {holder['since']}"
    except (OSError, ValueError, KeyError, TypeError):
        # The holder has the lock before its note is written: a note that is missing is seconds away.
        return "it has just started"
