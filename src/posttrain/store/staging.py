"""Temporary folders with an owner: the kernel, not age, tells a killed process's from a living one's."""

import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from posttrain.store.files import remove_tree, writing

_CLAIM = ".lock"


@contextmanager
def claimed_folder(parent: Path) -> Iterator[Path]:
    """A fresh folder below ``parent`` for as long as the context lasts; what is left of it is removed then.

    Raises:
        UserError: the disk refused.
    """
    folder = parent / uuid.uuid4().hex
    claim = FileLock(f"{folder}{_CLAIM}", thread_local=False)
    with writing(parent):
        parent.mkdir(parents=True, exist_ok=True)
        claim.acquire()
    try:
        with writing(parent):
            folder.mkdir()
        yield folder
    finally:
        remove_tree(folder)
        Path(claim.lock_file).unlink(missing_ok=True)
        claim.release()


def remove_unclaimed(parent: Path) -> int:
    """Remove the temporary folders below ``parent`` whose process has died; returns how many."""
    removed = 0
    if not parent.is_dir():
        return removed
    for path in sorted(parent.glob(f"*{_CLAIM}")):
        claim = FileLock(path, timeout=0, thread_local=False)
        try:
            claim.acquire()
        except Timeout:
            continue
        try:
            remove_tree(path.with_suffix(""))
            path.unlink(missing_ok=True)
            removed += 1
        finally:
            claim.release()
    return removed
