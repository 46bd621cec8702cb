"""Draws the states in which a power cut may leave the files of a trace (`file_layer`).

The model is that of ALICE (Pillai et al., "All File Systems Are Not Created Equal", OSDI 2014) and of fsync(2):

- After a file's fsync its bytes and size are on the disk. Of the writes, truncations and changes of permissions since,
  each file may keep all, none, the first few with the last one torn at any byte, or any 512-byte sectors: a missing
  sector holds its old bytes, or zeros where the file was shorter. A sector is written whole or not at all.
- A file's fsync says nothing of its name. A new, renamed or removed name is on the disk after an fsync of its folder;
  of two folders in a rename, of either. Before that it may be missing. A rename happens as a whole or not at all.
  Changes of names persist in their order (as on ext4), or any of them without the others (as on btrfs), as long as
  those are there that they build on: earlier changes of the same name, the earlier names of the renamed file, and for
  the removal of a folder those of its content.
- A committed transaction of SQLite is on the disk, and one that is not committed has no effect.

File systems with a journal promise at least this, most of them more: an fsync on ext4 takes all earlier names along.
Not in the model: SQLite's own writes, several processes that write at once, disks that confirm an fsync and lose it, a
failed fsync, and damage to what was synced.
"""

import os
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

from file_layer import ROOT, Commit, Mode, Names, Promise, Sync, Trace, Truncate, Write

SECTOR = 512

Pending = list[Write | Truncate | Mode]


@dataclass
class State:
    """The files after a power cut.

    Attributes:
        kinds: How it differs from the files before it: ``dropped``, ``torn``, ``sectors`` for writes, ``names``; empty
            where everything had reached the disk.
        promises: What the program had reported, in order.
    """

    names: dict[int, dict[str, int]]
    contents: dict[int, bytes]
    modes: dict[int, int]
    database: Commit | None
    kinds: set[str] = field(default_factory=set)
    promises: list[Promise] = field(default_factory=list)


class PowerCut:
    """The disk at one point of a trace: what is certain, and what may be lost."""

    def __init__(self, trace: Trace, point: int) -> None:
        self._trace = trace
        self._contents = {inode: bytearray(content) for inode, content in trace.contents.items()}
        self._modes = {inode: entry.mode for inode, entry in trace.inodes.items()}
        self._pending: dict[int, Pending] = {}
        self._changes: list[Names] = []
        self._needs: list[set[int]] = []
        self._certain: set[int] = set()
        self._database = trace.database
        self._promises: list[Promise] = []
        self._of_name: dict[tuple[int, str], int] = {}
        self._of_inode: dict[int, int] = {}
        self._in_folder: dict[int, set[int]] = {}
        for operation in islice(trace.operations, point):
            self._apply(operation)

    def draw(self, draw: random.Random) -> State:
        """Returns one of the states that the disk may be in."""
        state = self._state(self._draw_names(draw))
        # Often one way for all files, as one that lost all its writes is rare where each file draws its own.
        same_way = draw.choice(("kept", "dropped", "torn", "sectors", None, None))
        for inode, pending in self._pending.items():
            way = same_way or draw.choice(("kept", "dropped", "torn", "sectors"))
            content, mode = bytearray(self._contents.get(inode, b"")), self._modes[inode]
            for operation in _persisted(pending, way, draw, len(content)):
                mode = _apply_to_file(content, mode, operation)
            state.contents[inode], state.modes[inode] = bytes(content), mode
            if way != "kept" and any(not isinstance(operation, Mode) for operation in pending):
                state.kinds.add(way)
        return state

    def worst(self) -> State:
        """Returns the state in which everything is lost that may be lost."""
        return self._state(self._certain)

    def _state(self, changes: set[int]) -> State:
        """Returns the state with these changes of names, and with the content of files that is certain."""
        state = State(
            {inode: dict(names) for inode, names in self._trace.names.items()},
            {inode: bytes(content) for inode, content in self._contents.items()},
            dict(self._modes),
            self._database,
            promises=self._promises,
        )
        for number in sorted(changes):
            for folder, name, inode in self._changes[number].changes:
                if inode is not None:
                    state.names[folder][name] = inode
                else:
                    state.names[folder].pop(name, None)
        if len(changes) < len(self._changes):
            state.kinds.add("names")
        return state

    def _apply(self, operation: object) -> None:
        match operation:
            case Names():
                self._add_change(operation)
            case Write() | Truncate() | Mode():
                self._pending.setdefault(operation.inode, []).append(operation)
            case Sync(inode) if self._trace.inodes[inode].kind == "folder":
                for number in self._in_folder.get(inode, set()) - self._certain:
                    self._make_certain(number)
            case Sync(inode):
                content = self._contents.setdefault(inode, bytearray())
                for pending in self._pending.pop(inode, ()):
                    self._modes[inode] = _apply_to_file(content, self._modes[inode], pending)
            case Commit():
                self._database = operation
            case Promise():
                self._promises.append(operation)

    def _add_change(self, change: Names) -> None:
        number, needs = len(self._changes), set()
        for folder, name, inode in change.changes:
            needs.add(self._of_name.get((folder, name)))
            if inode is not None:
                needs.add(self._of_inode.get(inode))
                self._of_inode[inode] = number
            self._of_name[folder, name] = number
            self._in_folder.setdefault(folder, set()).add(number)
        if change.emptied is not None:
            needs |= self._in_folder.get(change.emptied, set())
        self._changes.append(change)
        self._needs.append({need for need in needs if need is not None and need != number})

    def _make_certain(self, number: int) -> None:
        waiting = [number]
        while waiting:
            number = waiting.pop()
            if number not in self._certain:
                self._certain.add(number)
                waiting += self._needs[number]

    def _draw_names(self, draw: random.Random) -> set[int]:
        """Draws the changes of names that reached the disk."""
        open_changes = [number for number in range(len(self._changes)) if number not in self._certain]
        share = draw.choice((0.0, 0.2, 0.5, 0.8, 1.0))
        kept = set(self._certain)
        if draw.random() < 0.5:
            return kept | set(open_changes[: draw.randint(0, len(open_changes))])
        for number in open_changes:
            # With all that it builds on; so a change is more likely kept if others build on it.
            if draw.random() < share:
                waiting = [number]
                while waiting:
                    needed = waiting.pop()
                    if needed not in kept:
                        kept.add(needed)
                        waiting += self._needs[needed]
        return kept


def _persisted(pending: Pending, way: str, draw: random.Random, size: int) -> Iterator[Write | Truncate | Mode]:
    if way == "kept":
        yield from pending
    elif way == "torn":
        whole = draw.randrange(len(pending))
        yield from pending[:whole]
        if isinstance(torn := pending[whole], Write):
            yield Write(torn.inode, torn.offset, torn.data[: draw.randint(0, len(torn.data))])
    elif way == "sectors":
        share = draw.choice((0.2, 0.5, 0.8))
        for operation in pending:
            if not isinstance(operation, Write):
                size = operation.size if isinstance(operation, Truncate) else size
                yield operation
                continue
            for start, data in _sectors(operation):
                end = start + len(data)
                if draw.random() < share:
                    yield Write(operation.inode, start, data)
                    size = max(size, end)
                elif end > size:
                    yield Truncate(operation.inode, end)  # the size is on the disk, the bytes are not
                    size = end


def _sectors(write: Write) -> Iterator[tuple[int, bytes]]:
    position = write.offset
    while position < write.offset + len(write.data):
        end = min((position // SECTOR + 1) * SECTOR, write.offset + len(write.data))
        yield position, write.data[position - write.offset : end - write.offset]
        position = end


def _apply_to_file(content: bytearray, mode: int, operation: Write | Truncate | Mode) -> int:
    """Changes the content in place; returns the file's permissions."""
    match operation:
        case Mode(_, mode):
            return mode
        case Truncate(_, size):
            del content[size:]
            content.extend(bytes(size - len(content)))
        case Write(_, offset, data):
            content.extend(bytes(max(0, offset - len(content))))
            content[offset : offset + len(data)] = data
    return mode


def write_state(trace: Trace, state: State, root: Path) -> None:
    """Writes the files of a state into an empty folder."""
    paths: dict[int, str] = {}
    folders: list[tuple[int, str]] = [(ROOT, str(root))]
    while folders:
        folder, path = folders.pop()
        if state.database is not None and state.database.folder == folder:
            for name, content in state.database.files.items():
                _write(f"{path}/{name}", content, 0o644)
        for name, inode in state.names[folder].items():
            child = f"{path}/{name}"
            kind = trace.inodes[inode].kind
            if inode in paths:
                os.link(paths[inode], child)
            elif kind == "folder":
                os.mkdir(child, state.modes[inode])
                folders.append((inode, child))
            elif kind == "link":
                os.symlink(trace.inodes[inode].target, child)
            else:
                _write(child, state.contents.get(inode, b""), state.modes[inode])
                paths[inode] = child


def _write(path: str, content: bytes, mode: int) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    try:
        os.write(descriptor, content)
    finally:
        os.close(descriptor)


def promised(promises: Sequence[Promise], name: str) -> list[object]:
    """Returns the values that were promised under a name, in order."""
    return [promise.value for promise in promises if promise.name == name]
