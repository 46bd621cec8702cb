"""Atomic writes, temporary folders with an owner, and disk errors as one clear line."""

import errno
import os
import shutil
import tempfile
import uuid
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from posttrain.store.errors import StorageError, UserError

_MESSAGES = {
    errno.ENOSPC: ("no space left on device", "free some space and run the same command again"),
    errno.EDQUOT: ("disk quota exceeded", "free some space and run the same command again"),
    errno.EFBIG: ("file too large for this file system or its limits", "raise the limit (ulimit -f)"),
    errno.EROFS: ("read-only file system", "use a folder that can be written to"),
    errno.EACCES: ("permission denied", "check who may read and write it"),
    errno.EPERM: ("operation not permitted", "check who may read and write it"),
}

# Libraries that write in native code raise their own error types, with the system's words in the message.
_DISK_FULL_MESSAGES = (
    "No space left on device",
    "os error 28",  # safetensors
    "PytorchStreamWriter failed writing",  # torch.save, which drops the system's reason
    "unexpected pos",  # torch.save, when it closes the file it could not write
)

_LOCK_SUFFIX = ".lock"


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Turn a full disk, a read-only file system and missing permissions into a ``Refused``.

    Args:
        place: what is written; named in the error unless the system names the file itself.

    Raises:
        Refused: the disk did.
    """
    try:
        yield
    except Exception as error:
        if refusal := to_storage_error(error, path):
            raise refusal from error
        raise


def to_storage_error(error: BaseException, path: Path) -> StorageError | None:
    """Returns the `StorageError` that stands for ``error`` if the disk refused a write, else None."""
    code = error.errno if isinstance(error, OSError) else None
    if code is None and any(phrase in str(error) for phrase in _DISK_FULL_MESSAGES):
        code = errno.ENOSPC
    if code not in _MESSAGES:
        return None
    what, fix = _MESSAGES[code]
    name = getattr(error, "filename", None)
    return StorageError(what, where=os.fsdecode(name) if isinstance(name, str | bytes) else str(path), fix=fix)


def make_folder(folder: Path) -> None:
    """Make a folder and those above it, unless it is there.

    Raises:
        UserError: a file is in its place, or the disk refused.
    """
    with disk_errors(folder):
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError):
            raise UserError("a file is where a folder is to be made", where=str(folder), fix="name another") from None


def sync_file(path: Path) -> None:
    """Have the file's bytes on the disk before returning."""
    descriptor = os.open(path, os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_folder(path: Path) -> None:
    """Have the folder's names (new, renamed, removed files) on the disk before returning."""
    if os.name == "nt":
        return  # Windows opens no folders, and journals their names itself
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(folder: Path) -> None:
    """Have all that is below a folder on the disk before returning, its files with the permissions of new ones."""
    for parent, _, names in os.walk(folder):
        for name in names:
            set_default_mode(Path(parent, name))
            sync_file(Path(parent, name))
        sync_folder(Path(parent))


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file so that a reader sees the old content or the new, never a part.

    Raises:
        UserError: the disk refused.
    """
    with disk_errors(path):
        descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(content)
                file.flush()
                os.fchmod(file.fileno(), _default_mode())
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise
        sync_folder(path.parent)


def check_new_file(path: Path, formats: Collection[str] = ()) -> None:
    """Find out before any work whether a file can be written where there is none yet.

    Args:
        formats: suffixes that are written; empty: any.

    Raises:
        UserError: its format is unknown, it exists, or its folder does not.
    """
    if formats and path.suffix.lower() not in formats:
        raise UserError(f"`{path.suffix}` is not a format we write", where=str(path), fix=f"use {', '.join(formats)}")
    if path.exists():
        raise UserError("the file exists already", where=str(path), fix="remove it or name another")
    if not path.absolute().parent.is_dir():
        raise UserError("there is no such folder", where=str(path.parent), fix="make it first")


def set_default_mode(path: Path) -> None:
    """Give a file the permissions that a new file has here; some libraries write files that only their owner reads."""
    path.chmod(_default_mode())


def _default_mode() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return 0o666 & ~mask


def remove_tree(path: Path) -> None:
    """Remove a folder with all in it; nothing happens if it is not there."""
    try:
        shutil.rmtree(path)
    except FileNotFoundError:
        if path.exists():  # another process removed files at the same time
            remove_tree(path)


def folder_files(folder: Path) -> dict[str, Path]:
    """Every file below ``folder`` by its POSIX path relative to it, sorted.

    Raises:
        ValueError: something in it is neither a file nor a folder, such as a symbolic link.
    """
    files = {}
    for parent, folders, names in os.walk(folder):
        for name in (*folders, *names):
            path = Path(parent, name)
            if path.is_symlink() or not (path.is_file() or path.is_dir()):
                raise ValueError(f"{path}: neither a file nor a folder; an artifact holds nothing else")
        for name in names:
            path = Path(parent, name)
            files[path.relative_to(folder).as_posix()] = path
    return dict(sorted(files.items()))


@contextmanager
def temporary_folder(parent: Path) -> Iterator[Path]:
    """Yields a fresh folder below ``parent`` and removes what is left of it at the end.

    The folder is locked: the kernel, not age, tells the folder of a killed process from that of a living one.

    Raises:
        UserError: the disk refused.
    """
    folder = parent / uuid.uuid4().hex
    claim = FileLock(f"{folder}{_LOCK_SUFFIX}", thread_local=False)
    with disk_errors(parent):
        parent.mkdir(parents=True, exist_ok=True)
        claim.acquire()
    try:
        with disk_errors(parent):
            folder.mkdir()
        yield folder
    finally:
        remove_tree(folder)
        Path(claim.lock_file).unlink(missing_ok=True)
        claim.release()


def remove_abandoned_folders(parent: Path) -> int:
    """Remove the temporary folders below ``parent`` whose process has died; returns how many."""
    removed = 0
    if not parent.is_dir():
        return removed
    for path in sorted(parent.glob(f"*{_LOCK_SUFFIX}")):
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
