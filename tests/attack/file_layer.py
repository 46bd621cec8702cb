"""Records the changes that Python code makes to the files below a folder, as a trace to simulate power cuts with.

While a `Recorder` is active, ``open`` and the functions of ``os`` that change files note what they do. Files are known
by inode, not by path, so that renamed folders and hard links need no care. A file that native code wrote is noted,
with its content, when Python first syncs or renames it. SQLite's files are noted as they are after each commit:
SQLite itself is trusted to keep a commit (``synchronous = FULL``).
"""

import builtins
import io
import os
import pickle
import shutil
import stat
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from posttrain.store.database import Database

DATABASE_FILES = ("store.db", "store.db-wal")

_NAMES = (
    *("open", "write", "fsync", "fdatasync", "truncate", "ftruncate", "chmod", "fchmod", "mkdir", "rmdir"),
    *("unlink", "remove", "rename", "replace", "link", "symlink"),
)
_REAL = {name: getattr(os, name) for name in _NAMES if hasattr(os, name)}
_REAL_OPEN = io.open


@dataclass(frozen=True)
class Names:
    """One atomic change of names: (folder, name, inode), or None in place of the inode for a name that is removed.

    Attributes:
        emptied: Inode of a folder that is removed.
    """

    changes: tuple[tuple[int, str, int | None], ...]
    emptied: int | None = None


@dataclass(frozen=True)
class Write:
    inode: int
    offset: int
    data: bytes


@dataclass(frozen=True)
class Truncate:
    inode: int
    size: int


@dataclass(frozen=True)
class Mode:
    inode: int
    mode: int


@dataclass(frozen=True)
class Sync:
    inode: int


@dataclass(frozen=True)
class Commit:
    """The files of a database in a folder, after a transaction."""

    folder: int
    files: dict[str, bytes]


@dataclass(frozen=True)
class Promise:
    """Something that the program reported: a power cut must not undo it."""

    name: str
    value: Any


Operation = Names | Write | Truncate | Mode | Sync | Commit | Promise


@dataclass(frozen=True)
class Inode:
    """Attributes: kind: ``file``, ``folder`` or ``link``; target: of a link; mode: at its creation."""

    kind: str
    mode: int = 0o644
    target: str = ""


ROOT = 0
"""The inode of the folder that is watched; it is on the disk from the beginning."""


@dataclass
class Trace:
    """What was done, from a folder whose first content is on the disk.

    Attributes:
        inodes: Every inode that there ever was.
        names: Names of each folder at the beginning.
        contents: Content of each file at the beginning.
        database: The database at the beginning.
    """

    inodes: dict[int, Inode] = field(default_factory=lambda: {ROOT: Inode("folder", 0o755)})
    names: dict[int, dict[str, int]] = field(default_factory=lambda: {ROOT: {}})
    contents: dict[int, bytes] = field(default_factory=dict)
    database: Commit | None = None
    operations: list[Operation] = field(default_factory=list)


class Recorder:
    """Records what is done below ``root``, which may hold files already, while `recording` is active."""

    def __init__(self, root: Path) -> None:
        self.trace = Trace()
        self._root = root
        self._ids = {_key(os.stat(root)): ROOT}
        self._kill_at: int | None = None
        self._kill_file: Path | None = None
        self._lock = threading.RLock()
        self._scan(root, ROOT)

    def promise(self, name: str, value: Any = True) -> None:
        """Notes that the program has reported something."""
        with self._lock:
            self.note(Promise(name, value))

    def kill_at(self, operation: int, file: Path) -> None:
        """Lets the process end before this operation, as by ``kill -9``; the trace up to there goes to ``file``."""
        self._kill_at, self._kill_file = operation, file

    def end(self) -> None:
        """Ends the process."""
        assert self._kill_file is not None
        with _REAL_OPEN(_REAL["open"](self._kill_file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), "wb") as file:
            pickle.dump((self.trace, self._ids), file)
        os._exit(0)

    def resume(self, file: Path) -> None:
        """Continues the trace of a process that was killed."""
        self.trace, self._ids = pickle.loads(file.read_bytes())  # noqa: S301 - our own process wrote it

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Replaces ``open``, functions of ``os`` and the end of the database's transactions."""
        begin, sendfile = Database._begin, shutil._USE_CP_SENDFILE

        @contextmanager
        def recorded_begin(database: Database, writes: bool) -> Iterator[Any]:
            if writes:
                self._step()
            with begin(database, writes) as connection:
                yield connection
            if writes:
                self._committed(Path(database.location).parent)

        before = {name: getattr(os, name) for name in _REAL}  # not `_REAL`: the tests skip fsync
        try:
            for name in _REAL:
                setattr(os, name, getattr(self, f"_{'unlink' if name == 'remove' else name}"))
            builtins.open = io.open = self._open_file
            Database._begin = recorded_begin
            shutil._USE_CP_SENDFILE = False  # copies through `write`
            yield
        finally:
            for name, function in before.items():
                setattr(os, name, function)
            builtins.open = io.open = _REAL_OPEN
            Database._begin = begin
            shutil._USE_CP_SENDFILE = sendfile

    def _scan(self, folder: Path, inode: int) -> None:
        for path in folder.iterdir():
            if path.name.startswith("store.db"):
                continue
            status = path.lstat()
            known = self._ids.get(_key(status))
            child = self._new(status, os.readlink(path) if path.is_symlink() else "") if known is None else known
            self.trace.names[inode][path.name] = child
            if stat.S_ISDIR(status.st_mode):
                self._scan(path, child)
            elif stat.S_ISREG(status.st_mode):
                self.trace.contents[child] = path.read_bytes()
        if (folder / "store.db").exists():
            self.trace.database = Commit(inode, _database_files(folder))

    def _new(self, status: os.stat_result, target: str = "") -> int:
        kind = "folder" if stat.S_ISDIR(status.st_mode) else "link" if stat.S_ISLNK(status.st_mode) else "file"
        inode = len(self.trace.inodes)
        self.trace.inodes[inode] = Inode(kind, stat.S_IMODE(status.st_mode), target)
        if kind == "folder":
            self.trace.names[inode] = {}
        self._ids[_key(status)] = inode  # the system may use the number of a removed inode again
        return inode

    def _step(self) -> None:
        if self._kill_at is not None and len(self.trace.operations) >= self._kill_at:
            self.end()

    def note(self, operation: Operation) -> None:
        """Adds an operation to the trace."""
        self.trace.operations.append(operation)

    def _committed(self, folder: Path) -> None:
        with self._lock:
            inode = self._ids.get(_key(os.stat(folder)))
            if inode is not None:
                first = self.trace.database is None and not any(isinstance(o, Commit) for o in self.trace.operations)
                self.note(Commit(inode, _database_files(folder)))
                if first:
                    # The first sync of a new log syncs its folder too (`UNIXFILE_DIRSYNC` in SQLite's os_unix.c).
                    self.note(Sync(inode))

    def _place(self, path: Any, folder: int | None = None) -> tuple[int, str] | None:
        """Returns the inode of the path's folder and its name there; None if it lies elsewhere."""
        if isinstance(path, int):
            return None
        parent, name = os.path.split(os.fsdecode(path))
        status = os.stat(parent or ".", dir_fd=folder)
        inode = self._ids.get(_key(status))
        return None if inode is None or not name else (inode, name)

    def _known(self, status: os.stat_result) -> int | None:
        return self._ids.get(_key(status))

    def _discover(self, path: Any) -> None:
        """Notes a file that native code wrote."""
        if (place := self._place(path)) and not place[1].startswith("store.db"):
            status = os.lstat(path)
            if self._known(status) is None and stat.S_ISREG(status.st_mode):
                inode = self._new(status)
                self.note(Names(((*place, inode),)))
                with _REAL_OPEN(path, "rb") as file:
                    self.note(Write(inode, 0, file.read()))

    # The functions of `os`, by their names; each does the work and notes it.

    def _open(self, path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        with self._lock:
            place = self._place(path, dir_fd) if flags & (os.O_CREAT | os.O_TRUNC | os.O_RDWR | os.O_WRONLY) else None
            if place is None:
                return _REAL["open"](path, flags, mode, dir_fd=dir_fd)
            self._step()
            is_new = not os.path.lexists(path)
            descriptor: int = _REAL["open"](path, flags, mode, dir_fd=dir_fd)
            if is_new:
                self.note(Names(((*place, self._new(os.fstat(descriptor))),)))
            else:
                self._discover(path)
                inode = self._known(os.fstat(descriptor))
                if flags & os.O_TRUNC and inode is not None:
                    self.note(Truncate(inode, 0))
            return descriptor

    def _open_file(self, file: Any, mode: str = "r", buffering: int = -1, *text: Any, **options: Any) -> Any:
        if not set(mode) & set("wax+"):
            return _REAL_OPEN(file, mode, buffering, *text, **options)
        opener = options.pop("opener", None) or (lambda path, flags: os.open(path, flags, 0o666))
        raw = _RecordedFile(self, file, mode.replace("b", "").replace("t", ""), options.pop("closefd", True), opener)
        if buffering == 0:
            return raw
        buffered = io.BufferedRandom(raw) if "+" in mode else io.BufferedWriter(raw)
        return buffered if "b" in mode else io.TextIOWrapper(buffered, *text, **options)

    def _write(self, descriptor: int, data: Any) -> int:
        return self.write(descriptor, lambda: _REAL["write"](descriptor, data), data)

    def write(self, descriptor: int, write: Callable[[], int], data: Any) -> int:
        """Writes to a file and notes it."""
        with self._lock:
            inode = self._known(os.fstat(descriptor))
            if inode is None:
                return write()
            self._step()
            count = write()
            offset = os.lseek(descriptor, 0, os.SEEK_CUR) - count  # behind what was appended too
            self.note(Write(inode, offset, bytes(memoryview(data).cast("B")[:count])))
            return count

    def _ftruncate(self, descriptor: int, size: int) -> None:
        self.truncate(descriptor, lambda: _REAL["ftruncate"](descriptor, size))

    def _truncate(self, path: Any, size: int) -> None:
        descriptor = path if isinstance(path, int) else _REAL["open"](path, os.O_RDONLY)
        try:
            self.truncate(descriptor, lambda: _REAL["truncate"](path, size))
        finally:
            if not isinstance(path, int):
                os.close(descriptor)

    def truncate(self, descriptor: int, truncate: Callable[[], Any]) -> None:
        """Truncates a file and notes it."""
        with self._lock:
            inode, before = self._known(os.fstat(descriptor)), os.fstat(descriptor).st_size
            self._step()
            truncate()
            size = os.fstat(descriptor).st_size
            if inode is not None and size != before:
                self.note(Truncate(inode, size))

    def _fsync(self, descriptor: Any) -> None:
        with self._lock:
            self._step()
            number = descriptor if isinstance(descriptor, int) else descriptor.fileno()
            _REAL["fsync"](number)
            if (inode := self._known(os.fstat(number))) is not None:
                self.note(Sync(inode))

    _fdatasync = _fsync

    def _chmod(self, path: Any, mode: int, **options: Any) -> None:
        _REAL["chmod"](path, mode, **options)
        with self._lock:
            if (inode := self._known(os.stat(path))) is not None:
                self.note(Mode(inode, mode))

    def _fchmod(self, descriptor: int, mode: int) -> None:
        self._chmod(descriptor, mode)

    def _mkdir(self, path: Any, mode: int = 0o777, *, dir_fd: int | None = None) -> None:
        self._named(path, dir_fd, lambda: _REAL["mkdir"](path, mode, dir_fd=dir_fd))

    def _symlink(self, target: Any, path: Any, is_folder: bool = False, *, dir_fd: int | None = None, **_: Any) -> None:
        self._named(path, dir_fd, lambda: _REAL["symlink"](target, path, dir_fd=dir_fd), os.fspath(target))

    def _named(self, path: Any, folder: int | None, create: Callable[[], None], target: str = "") -> None:
        with self._lock:
            self._step()
            create()
            if place := self._place(path, folder):
                inode = self._new(os.stat(place[1] if folder else path, dir_fd=folder, follow_symlinks=False), target)
                self.note(Names(((*place, inode),)))

    def _link(self, source: Any, path: Any, **options: Any) -> None:
        with self._lock:
            self._step()
            _REAL["link"](source, path, **options)
            if place := self._place(path):
                self.note(Names(((*place, self._known(os.stat(path))),)))

    def _unlink(self, path: Any, *, dir_fd: int | None = None) -> None:
        self._removed(path, dir_fd, _REAL["unlink"])

    def _rmdir(self, path: Any, *, dir_fd: int | None = None) -> None:
        self._removed(path, dir_fd, _REAL["rmdir"])

    def _removed(self, path: Any, folder: int | None, remove: Callable[..., None]) -> None:
        with self._lock:
            self._step()
            status = os.stat(path, dir_fd=folder, follow_symlinks=False)
            remove(path, dir_fd=folder)
            if place := self._place(path, folder):
                emptied = self._known(status) if stat.S_ISDIR(status.st_mode) else None
                self.note(Names(((*place, None),), emptied))

    def _rename(self, source: Any, target: Any, **options: Any) -> None:
        with self._lock:
            self._step()
            self._discover(source)
            inode = self._known(os.lstat(source))
            _REAL["rename"](source, target, **options)
            places = (self._place(source), None), (self._place(target), inode)
            changes = tuple((*place, value) for place, value in places if place)
            if inode is not None and changes:
                self.note(Names(changes))

    _replace = _rename


class _RecordedFile(io.FileIO):
    def __init__(self, recorder: Recorder, file: Any, mode: str, closefd: bool, opener: Any) -> None:
        self._recorder = recorder
        super().__init__(file, mode, closefd, None if isinstance(file, int) else opener)

    def write(self, data: Any) -> int:
        return self._recorder.write(self.fileno(), lambda: super(_RecordedFile, self).write(data), data)

    def truncate(self, size: int | None = None) -> int:
        self._recorder.truncate(self.fileno(), lambda: super(_RecordedFile, self).truncate(size))
        return os.fstat(self.fileno()).st_size


def _key(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino


def _database_files(folder: Path) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in DATABASE_FILES if (folder / name).exists()}
