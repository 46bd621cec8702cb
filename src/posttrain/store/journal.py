"""The journal: a file with every change of the database's rows, to verify them and to rebuild a lost database.

A line with a checksum (`posttrain.store.hashing`) holds the changes of one transaction and its number. It is synced to
the disk before the transaction commits, and the database counts committed transactions: a last line that is one ahead
of the database belongs to a transaction that a kill undid.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from posttrain.store.errors import MovedWorkspaceError
from posttrain.store.files import disk_errors, folder_id, sync_folder
from posttrain.store.hashing import decode_line, encode_line, has_hole, read_lines

_BLOCK = 1 << 16

Change = tuple[str, list[Any], dict[str, Any] | None]
"""A table's name, the row's primary key, and the columns that changed; None in their place for a deleted row."""

Rows = dict[str, dict[tuple[Any, ...], dict[str, Any]]]
"""Rows of each table by their primary key, as JSON values by column."""


@dataclass(frozen=True)
class JournalEnd:
    """Number of a journal's last transaction, 0 if there is none; ``snapshot``: its entry holds all rows."""

    number: int = 0
    snapshot: bool = False


class Journal:
    """A journal file, which only grows.

    Args:
        path: The file; it is made by the first `append`.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._folder_id = folder_id(path.parent)
        self._end: int | None = None  # of the file, after what this object appended last

    def append(self, number: int, changes: Sequence[Change], *, snapshot: bool = False) -> None:
        """Adds a transaction's changes and returns once they are on the disk.

        Args:
            number: Number of the transaction. Entries with this or a higher number no longer count: their
                transactions never committed.
            snapshot: True if ``changes`` are all rows of the database.

        Raises:
            MovedWorkspaceError: the journal's folder is another one than at the start.
            StorageError: the disk refused.
        """
        # The open database has moved along with the first folder: the two must not part.
        if folder_id(self.path.parent) != self._folder_id:
            raise MovedWorkspaceError(self.path.parent.parent)
        entry: dict[str, Any] = {"number": number, "changes": changes}
        line = encode_line(entry | ({"snapshot": True} if snapshot else {}))
        with disk_errors(self.path):
            is_new = not self.path.exists()
            with self.path.open("ab+") as file:
                # A line that a kill or a power cut left unfinished would swallow this one, or count as damage. What
                # this object wrote itself, and nobody since, is whole: the last line may have megabytes to read.
                size = file.seek(0, os.SEEK_END)
                if size != self._end:
                    size = _whole_bytes(file)
                    file.truncate(size)
                self._end = None
                file.write(line)
                file.flush()
                os.fsync(file.fileno())
                self._end = size + len(line)
            if is_new:
                sync_folder(self.path.parent)

    def last(self) -> JournalEnd | None:
        """Returns the end of the journal; None if its last line is damaged."""
        try:
            with self.path.open("rb") as file:
                end = _whole_bytes(file)
                if not end:
                    return JournalEnd()
                entry = decode_line(_last_line(file, end)[1])
        except FileNotFoundError:
            return JournalEnd()
        return None if entry is None else JournalEnd(entry["number"], entry.get("snapshot", False))


def _whole_bytes(file: Any) -> int:
    """Returns the bytes up to the end of the last finished line, as `read_lines` does."""
    end = _line_start(file, file.seek(0, os.SEEK_END))
    while end:
        start, line = _last_line(file, end)
        if not has_hole(line, start):
            break
        end = start
    return end


def _last_line(file: Any, end: int) -> tuple[int, bytes]:
    """Returns the position and the bytes of the line that ends at ``end``, without its end."""
    start = _line_start(file, end - 1)
    file.seek(start)
    return start, file.read(end - 1 - start)


def _line_start(file: Any, end: int) -> int:
    """Returns the position behind the last line end before ``end``; 0 if there is none."""
    # Backwards in blocks: the file may hold the changes of years.
    while end > 0:
        start = max(0, end - _BLOCK)
        file.seek(start)
        at = file.read(end - start).rfind(b"\n")
        if at >= 0:
            return start + int(at) + 1
        end = start
    return 0


@dataclass
class JournalContent:
    """The content of a journal.

    Attributes:
        entries: Changes by the number of their transaction.
        snapshots: Numbers of the entries that hold all rows and not only changes.
        damaged: 1-based numbers of the lines that do not match their checksum.
    """

    entries: dict[int, list[Change]] = field(default_factory=dict)
    snapshots: set[int] = field(default_factory=set)
    damaged: list[int] = field(default_factory=list)

    @property
    def last(self) -> int:
        """Number of the last transaction; 0 if there is none."""
        return max(self.entries, default=0)

    def missing(self, position: int) -> list[int]:
        """Returns the numbers up to ``position`` that no entry has, and that `rows` needs."""
        return [number for number in range(self._first(position), position + 1) if number not in self.entries]

    def rows(self, position: int) -> Rows:
        """Returns all rows as they are after the transaction ``position``."""
        rows: Rows = {}
        for number in range(self._first(position), position + 1):
            for table, key, values in self.entries.get(number, ()):
                of_table = rows.setdefault(table, {})
                if values is None:
                    of_table.pop(tuple(key), None)
                else:
                    of_table[tuple(key)] = {**of_table.get(tuple(key), {}), **values}
        return rows

    def _first(self, position: int) -> int:
        return max((number for number in self.snapshots if number <= position), default=1)


def read_journal(path: Path) -> JournalContent:
    """Reads a journal file; one that is missing has no entries."""
    try:
        lines = read_lines(path.read_bytes())
    except FileNotFoundError:
        return JournalContent()
    content, last = JournalContent(damaged=lines.damaged), 0
    for entry in lines.values:
        number = entry["number"]
        # Transactions that did not commit wrote these numbers before, or a database that a backup has replaced.
        for undone in range(number, last + 1):
            content.entries.pop(undone, None)
            content.snapshots.discard(undone)
        content.entries[number] = [(table, key, values) for table, key, values in entry["changes"]]
        if entry.get("snapshot"):
            content.snapshots.add(number)
        last = number
    return content
