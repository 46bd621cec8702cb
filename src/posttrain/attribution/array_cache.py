"""Arrays cached in files with checksums, so that killed work resumes and several processes share it."""

import hashlib
import io
import logging
from collections.abc import Callable
from pathlib import Path

import numpy as np
from filelock import FileLock, Timeout

from posttrain.store.files import disk_errors, write_atomically

log = logging.getLogger("posttrain")

_CHECKSUM_BYTES = 32  # bytes of SHA-256


def cached_array(
    file: Path, shape: tuple[int, int], make: Callable[[], np.ndarray], wait: bool = True
) -> np.ndarray | None:
    """What the file holds, made and written first where it is missing or damaged.

    Args:
        file: written whole or not at all.
        shape: of the array; a file with another counts as damaged.
        make: gives it.
        wait: for another process that is at it; otherwise None is returned.
    """
    locked = file.with_suffix(".lock")
    if (found := _read(file, shape)) is not None:
        locked.unlink(missing_ok=True)  # of a process that was killed as soon as it had written the file
        return found
    lock = FileLock(locked, timeout=-1 if wait else 0, thread_local=False)
    try:
        with disk_errors(file):
            lock.acquire()
    except Timeout:
        return None
    try:
        found = _read(file, shape)  # another process may have made it just now
        if found is None:
            found = make()
            stream = io.BytesIO()
            np.save(stream, found, allow_pickle=False)
            content = stream.getvalue()
            write_atomically(file, hashlib.sha256(content).digest() + content)
        return found
    finally:
        locked.unlink(missing_ok=True)
        lock.release()


def _read(file: Path, shape: tuple[int, int]) -> np.ndarray | None:
    """The file's array; None if it is missing or, with a warning, damaged."""
    try:
        whole = file.read_bytes()
    except FileNotFoundError:
        return None
    content = whole[_CHECKSUM_BYTES:]
    if hashlib.sha256(content).digest() == whole[:_CHECKSUM_BYTES]:
        found: np.ndarray = np.load(io.BytesIO(content), allow_pickle=False)
        if found.shape == shape:
            return found
    log.warning("%s is damaged: it is computed again", file)
    return None
