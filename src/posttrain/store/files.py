"""Atomic writes, files with a checksum, locks, temporary folders, and disk errors as one clear line."""

import errno
import hashlib
import json
import logging
import os
import platform
import re
import shutil
import tempfile
import uuid
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path

from filelock import FileLock, Timeout

from posttrain.store.errors import LockedError, MovedWorkspaceError, StorageError, UserError

_MESSAGES = {
    errno.ENOSPC: ("no space left on device", "free some space and run the same command again"),
    errno.EDQUOT: ("disk quota exceeded", "free some space and run the same command again"),
    errno.EFBIG: ("file too large for this file system or its limits", "raise the limit (ulimit -f)"),
    errno.EROFS: ("read-only file system", "use a folder that can be written to"),
    errno.EACCES: ("permission denied", "check who may read and write it"),
    errno.EPERM: ("operation not permitted", "check who may read and write it"),
}

# Libraries that write in native code raise their own error types: only the message tells a full disk from a bug.
_DISK_FULL_MESSAGES = (
    "No space left on device",
    "os error 28",  # safetensors
    "PytorchStreamWriter failed writing",  # torch.save, which drops the system's reason
    "unexpected pos",  # torch.save, when it closes the file it could not write
)

_LOCK_SUFFIX = ".lock"

HOME = ".posttrain"
"""Name of the folder with a workspace's store."""

_TEMPORARY = re.compile("[0-9a-f]{32}")

_CHECKSUM_BYTES = hashlib.sha256().digest_size

log = logging.getLogger("posttrain")


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Turns a full disk, a read-only file system and missing permissions into a `StorageError`.

    Args:
        path: The file or folder being written; named in the error unless the system names the file itself.

    Raises:
        StorageError: the disk refused a write.
    """
    try:
        yield
    # Not OSError alone: libraries that write in native code raise types of their own.
    except Exception as error:
        if refusal := to_storage_error(error, path):
            raise refusal from error
        raise


def to_storage_error(error: BaseException, path: Path) -> StorageError | None:
    """Returns a `StorageError` for ``error`` if the disk refused a write, else None."""
    code = error.errno if isinstance(error, OSError) else None
    if code is None and any(phrase in str(error) for phrase in _DISK_FULL_MESSAGES):
        code = errno.ENOSPC
    if code not in _MESSAGES:
        return None
    what, fix = _MESSAGES[code]
    name = getattr(error, "filename", None)
    return StorageError(what, where=os.fsdecode(name) if isinstance(name, str | bytes) else str(path), fix=fix)


def make_folder(folder: Path, *, with_store: bool = False) -> None:
    """Makes a folder and its parents, unless it exists, and writes their names through to the disk.

    Args:
        with_store: whether it may be the first folder of a workspace's store.

    Raises:
        MovedWorkspaceError: the folder lies in a workspace's store that does not exist.
        UserError: a file has this path, or the disk refused.
    """
    with disk_errors(folder):
        missing = [path for path in (folder, *folder.parents) if not path.exists()]
        # Few make a store: one that is missing was moved, and the rest of the work must not go
        # where nobody looks for it.
        if not with_store and (home := next((path for path in missing if path.name == HOME), None)):
            raise MovedWorkspaceError(home.parent)
        try:
            # Else a power cut could take the folder with all synced files in it. The outer ones first, and again the
            # last one that exists: a killed process may have made it and not have come to syncing it.
            for path in (missing[-1].parent if missing else folder, *reversed(missing)):
                path.mkdir(exist_ok=True)
                sync_name(path)
        except (FileExistsError, NotADirectoryError):
            raise UserError("a file has the folder's path", where=str(folder), fix="name another folder") from None


def folder_id(folder: Path) -> tuple[int, int] | None:
    """Returns what the system knows a folder by, wherever it is moved to; None if there is none."""
    try:
        status = folder.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


def sync_name(path: Path) -> None:
    """Writes the name of a new file or folder through to the disk, unless its parent folder may not be read."""
    with suppress(PermissionError):
        sync_folder(path.parent)


def sync_file(path: Path) -> None:
    """Writes the file's bytes through to the disk."""
    # Without it the bytes are in the page cache: they survive a kill of this process, but no power cut.
    descriptor = os.open(path, os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_folder(path: Path) -> None:
    """Writes the folder's names (new, renamed, removed files) through to the disk."""
    # A file's own sync does not cover its name: after a power cut the synced bytes could lie under no name.
    if os.name == "nt":
        return  # Windows opens no folders, and journals their names itself
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(folder: Path) -> None:
    """Writes everything below a folder through to the disk, and gives its files the permissions of new ones."""
    for parent, _, names in os.walk(folder):
        for name in names:
            set_default_mode(Path(parent, name))
            sync_file(Path(parent, name))
        sync_folder(Path(parent))


def write_atomically(path: Path, content: bytes) -> None:
    """Writes a file so that a reader sees the old content or the new, never a part.

    Raises:
        UserError: the disk refused.
    """
    with disk_errors(path):
        # In the same folder, as a rename is atomic within one file system only.
        descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(content)
                file.flush()
                os.fchmod(file.fileno(), _default_mode())  # `mkstemp` lets only the owner read
                # Before the rename, else a power cut may leave the new name with an empty file and the old one lost.
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise
        sync_folder(path.parent)


def write_checked(path: Path, content: bytes) -> None:
    """Writes bytes behind their SHA-256, whole or not at all.

    Raises:
        UserError: the disk refused.
    """
    write_atomically(path, hashlib.sha256(content).digest() + content)


def read_checked(path: Path) -> bytes | None:
    """Reads the bytes that `write_checked` wrote; None if the file is missing or, with a warning, damaged."""
    try:
        whole = path.read_bytes()
    except FileNotFoundError:
        return None
    # A checksum and not only an atomic write: a disk can return other bytes than it was given.
    content = strip_checksum(whole)
    if content is None:
        log.warning("%s is damaged: it is computed again", path)
    return content


def strip_checksum(whole: bytes) -> bytes | None:
    """Returns the bytes behind the SHA-256 that `write_checked` put before them; None if it does not match."""
    content = whole[_CHECKSUM_BYTES:]
    return content if hashlib.sha256(content).digest() == whole[:_CHECKSUM_BYTES] else None


def check_new_file(path: Path, formats: Collection[str] = ()) -> None:
    """Checks before any work that a new file can be written to ``path``.

    Args:
        formats: Suffixes of the supported formats; empty for any.

    Raises:
        UserError: its format is unknown, it exists, or its folder does not.
    """
    if formats and path.suffix.lower() not in formats:
        raise UserError(f"`{path.suffix}` is not a supported format", where=str(path), fix=f"use {', '.join(formats)}")
    if path.exists():
        raise UserError("the file exists already", where=str(path), fix="remove it or name another")
    if not path.absolute().parent.is_dir():
        raise UserError("there is no such folder", where=str(path.parent), fix="make it first")


def set_default_mode(path: Path) -> None:
    """Gives a file the permissions of a new file."""
    # safetensors and others write files that only their owner can read; a shared workspace has several readers.
    path.chmod(_default_mode())


def set_read_only(path: Path) -> None:
    """Takes everyone's permission to write from a file; who may read it stays as it is."""
    path.chmod(path.stat().st_mode & 0o444)


def _default_mode() -> int:
    # The mask can only be read by setting it.
    mask = os.umask(0)
    os.umask(mask)
    return 0o666 & ~mask


def remove_tree(path: Path) -> None:
    """Removes a folder with its content; does nothing if there is none."""
    try:
        shutil.rmtree(path)
    except FileNotFoundError:
        if path.exists():  # another process removed files at the same time
            remove_tree(path)


def folder_files(folder: Path) -> dict[str, Path]:
    """Returns every file below ``folder`` by its POSIX path relative to it, sorted.

    Raises:
        ValueError: something in it is neither a file nor a folder, such as a symbolic link.
    """
    files = {}
    for parent, folders, names in os.walk(folder):
        for name in (*folders, *names):
            path = Path(parent, name)
            # A link's target can change or vanish later, which no checksum of the artifact would show.
            if path.is_symlink() or not (path.is_file() or path.is_dir()):
                raise ValueError(f"{path}: neither a file nor a folder; an artifact holds nothing else")
        for name in names:
            path = Path(parent, name)
            files[path.relative_to(folder).as_posix()] = path
    return dict(sorted(files.items()))


def copy_files(source: Path, target: Path) -> None:
    """Copies every file below one folder into another, with new permissions.

    Raises:
        ValueError: something in ``source`` is neither a file nor a folder.
    """
    # Not `shutil.copytree`, which continues after an error, and hides a full disk in an error of its own.
    for name, path in folder_files(source).items():
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target / name)


@contextmanager
def hold_lock(
    path: Path, *, wait: float = 0, busy_message: str = "another posttrain works in this workspace"
) -> Iterator[None]:
    """Holds the lock file ``path`` and names its holder in a file of the same name with ``.json``.

    The kernel releases the lock when the process dies, however it dies.

    Args:
        wait: Seconds to wait for another process to let go.
        busy_message: Text of the error if it does not let go.

    Raises:
        LockedError: another process holds it; names its id, its host and since when.
    """
    # `FileLock` would make the folder, and so would lock an empty one in place of a workspace that was moved.
    if not path.parent.is_dir():
        make_folder(path.parent)
    # Not bound to this thread, as a release by another one would do nothing.
    lock = FileLock(path, timeout=wait, thread_local=False)
    note = _note(path)
    try:
        with disk_errors(path):
            lock.acquire()
    except Timeout:
        raise LockedError(
            f"{busy_message} ({describe_holder(path)})",
            where=str(path.parent.parent),
            fix="wait for it to end, or end it",
        ) from None
    try:
        # Of holders that were killed while they wrote their note; only the holder writes one.
        for unfinished in note.parent.glob(f".{note.name}.*"):
            unfinished.unlink(missing_ok=True)
        holder = {"pid": os.getpid(), "host": platform.node(), "since": datetime.now(UTC).isoformat(timespec="seconds")}
        write_atomically(note, json.dumps(holder).encode())
        yield
    finally:
        # In this order: after the release the note could already be the next holder's.
        try:
            note.unlink(missing_ok=True)
        finally:
            lock.release()


def is_locked(path: Path) -> bool:
    """Returns whether a process holds the lock file ``path``, as far as its note tells.

    The lock itself is not tried: who begins in that moment would be refused.
    """
    try:
        holder = json.loads(_note(path).read_bytes())
        if holder["host"] == platform.node():
            os.kill(int(holder["pid"]), 0)
    except PermissionError:
        return True  # the process is another user's
    except (OSError, ValueError, KeyError, TypeError):
        return False
    return True


def describe_holder(path: Path) -> str:
    """Describes the process that holds the lock file ``path``: its id, its host and since when."""
    try:
        holder = json.loads(_note(path).read_bytes())
        return f"process {holder['pid']} on {holder['host']} since {holder['since']}"
    except (OSError, ValueError, KeyError, TypeError):
        # The holder has the lock before its note is written: a note that is missing is seconds away.
        return "it has just started"


def _note(path: Path) -> Path:
    # Beside the lock, not in it: Windows lets nobody read a locked file, and the holder's name is for the others.
    return path.with_name(f"{path.name}.json")


@contextmanager
def temporary_folder(parent: Path) -> Iterator[Path]:
    """Yields a fresh folder below ``parent`` and removes whatever of it still exists at the end.

    Raises:
        UserError: the disk refused.
    """
    folder = parent / uuid.uuid4().hex
    # Locked, and before the folder exists: the kernel, not age, tells the folder of a killed process from that of a
    # living one, and a clean-up must never meet a living folder without its lock.
    claim = FileLock(f"{folder}{_LOCK_SUFFIX}", thread_local=False)
    if not parent.is_dir():
        make_folder(parent)
    with disk_errors(parent):
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
    """Removes the temporary folders below ``parent`` whose process has died; returns how many."""
    removed = 0
    if not parent.is_dir():
        return removed
    # A power cut can leave a folder and lose its lock. In this order: a living folder has its lock all the time.
    for folder in [path for path in parent.iterdir() if _TEMPORARY.fullmatch(path.name)]:
        if not Path(f"{folder}{_LOCK_SUFFIX}").exists():
            remove_tree(folder)
            removed += 1
    for path in sorted(parent.glob(f"*{_LOCK_SUFFIX}")):
        claim = FileLock(path, timeout=0, thread_local=False)
        try:
            claim.acquire()
        except Timeout:
            continue  # its process is alive
        try:
            # The folder first: a kill in between leaves the lock's file, by which the next clean-up finds the rest.
            remove_tree(path.with_suffix(""))
            path.unlink(missing_ok=True)
            removed += 1
        finally:
            claim.release()
    return removed
