"""Arrays that a folder keeps, so that what was killed goes on and several processes share the work."""

import hashlib
import io
import logging
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from filelock import FileLock, Timeout

from posttrain.select.value.influence.learner import Batch
from posttrain.store.files import write_atomically, writing

log = logging.getLogger("posttrain")

_SUM = 32  # bytes of SHA-256


def kept(file: Path, shape: tuple[int, int], make: Callable[[], np.ndarray], wait: bool = True) -> np.ndarray | None:
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
        with writing(file):
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
    content = whole[_SUM:]
    if hashlib.sha256(content).digest() == whole[:_SUM]:
        found: np.ndarray = np.load(io.BytesIO(content), allow_pickle=False)
        if found.shape == shape:
            return found
    log.warning("%s is damaged: it is computed again", file)
    return None


def content_key(batch: Batch) -> str:
    """64 hex characters that tell a batch's numbers."""
    made = hashlib.sha256()
    for part in batch:
        made.update(f"{part.dtype} {tuple(part.shape)}\n".encode())
        made.update(part.cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return made.hexdigest()
