"""Arrays cached in files with checksums, so that killed work resumes and several processes share it."""

import io
import logging
from collections.abc import Callable
from pathlib import Path

import numpy as np
from filelock import FileLock, Timeout

from posttrain.store.files import disk_errors, read_checked, write_checked

log = logging.getLogger("posttrain")


def cached_array(
    file: Path, shape: tuple[int, int], compute: Callable[[], np.ndarray], wait: bool = True
) -> np.ndarray | None:
    """Reads an array from a file; computes and writes it first if the file is missing or damaged.

    Args:
        file: written whole or not at all.
        shape: shape of the array; a file with another shape counts as damaged.
        compute: returns the array.
        wait: wait for another process that is computing it; otherwise return None at once.
    """
    lock_file = file.with_suffix(".lock")
    if (array := _read_array(file, shape)) is not None:
        # A process that was killed between its write and its unlink left the lock file behind.
        lock_file.unlink(missing_ok=True)
        return array
    lock = FileLock(lock_file, timeout=-1 if wait else 0, thread_local=False)
    try:
        with disk_errors(file):
            lock.acquire()
    except Timeout:
        return None
    try:
        # Read again under the lock: another process may have written it since the first look.
        array = _read_array(file, shape)
        if array is None:
            array = compute()
            stream = io.BytesIO()
            np.save(stream, array, allow_pickle=False)
            write_checked(file, stream.getvalue())
        return array
    finally:
        # Unlinked before it is released: afterwards the file could be the next holder's.
        lock_file.unlink(missing_ok=True)
        lock.release()


def _read_array(file: Path, shape: tuple[int, int]) -> np.ndarray | None:
    """Reads the file's array; None if it is missing or, with a warning, damaged."""
    content = read_checked(file)
    if content is None:
        return None
    array: np.ndarray = np.load(io.BytesIO(content), allow_pickle=False)
    if array.shape == shape:
        return array
    log.warning("%s is damaged: it is computed again", file)
    return None
