"""The content of a journal: the rows after any of its transactions, to verify a database and to rebuild a lost one."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from posttrain.store.hashing import read_lines

Change = tuple[str, list[Any], dict[str, Any] | None]
"""A table's name, the row's primary key, and the columns that changed; None in their place for a deleted row."""

Rows = dict[str, dict[tuple[Any, ...], dict[str, Any]]]
"""Rows of each table by their primary key, as JSON values by column."""


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
