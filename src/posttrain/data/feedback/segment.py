"""Writes and verifies a file of an inbox: appended to while it is open, and never changed once it is sealed.

``segments/000001.open`` is being written; when it is full, or on request, it is renamed to ``000001.jsonl``.
"""

import logging
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path

from posttrain.store.files import sync_folder, write_atomically
from posttrain.store.hashing import decode_line, has_hole, read_lines

log = logging.getLogger("posttrain")


class Segment(AbstractContextManager["Segment"]):
    """Writes to an open segment, from one thread.

    Attributes:
        number: of the segment; an inbox's first is 1.
        size: bytes on the disk.
    """

    def __init__(self, inbox: Path, number: int) -> None:
        """Creates the segment, or opens it and cuts off what a crash left unfinished.

        Raises:
            OSError: the disk refused.
        """
        self.number = number
        self.path = open_segment_path(inbox, number)
        # An unfinished line was never acknowledged, and would swallow the next entry.
        _remove_unfinished(self.path)
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | getattr(os, "O_CLOEXEC", 0)
        self._descriptor = os.open(self.path, flags, 0o666)
        try:
            sync_folder(self.path.parent)
            os.fsync(self._descriptor)  # what a killed process left in the cache counts as acknowledged from now on
            self.size = os.fstat(self._descriptor).st_size
        except BaseException:
            self.close()
            raise

    def append(self, data: bytes) -> None:
        """Adds whole lines, and returns once they are on the disk.

        Raises:
            OSError: the disk refused; `undo` takes back what it took.
        """
        view = memoryview(data)
        while view:
            # A write may accept fewer bytes than it is given.
            view = view[os.write(self._descriptor, view) :]
        os.fsync(self._descriptor)
        self.size += len(data)

    def undo(self) -> None:
        """Removes what a refused `append` left.

        Raises:
            OSError: the disk refused this too.
        """
        os.ftruncate(self._descriptor, self.size)
        os.fsync(self._descriptor)

    def seal(self) -> None:
        """Renames the segment to the name under which nobody changes it.

        Raises:
            OSError: the disk refused.
        """
        os.replace(self.path, self.path.with_suffix(".jsonl"))

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        os.close(self._descriptor)


def sealed_segments(inbox: Path) -> list[Path]:
    """Lists the sealed segments of an inbox, oldest first."""
    return sorted((inbox / "segments").glob("[0-9]*.jsonl"))


def seal_stale_segments(inbox: Path) -> int | None:
    """Seals segments with entries that a crash left open, except the last; returns the last's number, or None.

    A crash of the machine may undo the rename of a full segment but keep the next one, with entries.

    Raises:
        OSError: the disk refused.
    """
    unsealed = [path for path in sorted((inbox / "segments").glob("[0-9]*.open")) if path.stat().st_size]
    newest = max((int(path.stem) for path in [*unsealed, *sealed_segments(inbox)]), default=0)
    for path in unsealed:
        if int(path.stem) == newest and not path.with_suffix(".jsonl").exists():
            return newest
        # Two segments of one number can only come from outside; sealing would overwrite acknowledged entries.
        if path.with_suffix(".jsonl").exists():
            log.warning("%s: a sealed segment has this number already; ignoring the file", path)
            continue
        _remove_unfinished(path)
        with path.open("rb") as file:
            os.fsync(file.fileno())  # what a killed process left in the cache counts as acknowledged from now on
        os.replace(path, path.with_suffix(".jsonl"))
        sync_folder(path.parent)
    return None


def open_segment_path(inbox: Path, number: int) -> Path:
    """Path of the segment of that number while it is open."""
    return inbox / "segments" / f"{number:06d}.open"


def _remove_unfinished(path: Path) -> None:
    """Removes what a crash left of entries that were never acknowledged."""
    raw = path.read_bytes() if path.exists() else b""
    lines = read_lines(raw)
    if lines.holes:
        # Entries that share a write: a power cut may keep a later one and not this one.
        log.warning("%s: removing %d lines that were never finished or acknowledged", path, len(lines.holes))
        numbered = enumerate(raw[: lines.whole].split(b"\n")[:-1], 1)
        write_atomically(path, b"".join(line + b"\n" for number, line in numbered if number not in lines.holes))
    elif lines.whole < len(raw):
        log.warning("%s: cutting off the last line, which was never finished or acknowledged", path)
        os.truncate(path, lines.whole)


def count_entries(inbox: Path) -> int:
    """Counts the acknowledged entries."""
    return sum(len(read_lines(path.read_bytes()).values) for path in list_segments(inbox))


def inbox_problems(inbox: Path, *, quick: bool = False) -> Iterator[tuple[Path, str]]:
    """Yields each damaged segment and what is wrong with it; reads only, whether a process has the inbox open or none.

    Args:
        inbox: The inbox's folder.
        quick: True reads no segment: only missing and empty ones are detected.
    """
    numbers = [int(path.stem) for path in list_segments(inbox)]
    for number in range(1, max(numbers, default=0)):
        if number not in numbers:
            yield open_segment_path(inbox, number).with_suffix(".jsonl"), "is missing"
    for mark in sorted((inbox / "segments").glob("[0-9]*.taken")):
        if int(mark.stem) not in numbers:
            yield mark.with_suffix(".jsonl"), "is missing, although its records were taken"
    for path in list_segments(inbox):
        if path.suffix == ".jsonl" and not path.stat().st_size:
            yield path, "is empty"
        elif not quick:
            yield from ((path, problem) for problem in _segment_problems(path))


def list_segments(inbox: Path) -> list[Path]:
    """Lists all segments of an inbox, oldest first, the open one too."""
    return sorted([*sealed_segments(inbox), *(inbox / "segments").glob("[0-9]*.open")])


def _segment_problems(path: Path) -> Iterator[str]:
    raw = path.read_bytes()
    lines = read_lines(raw)
    is_open = path.suffix == ".open"
    for number in lines.damaged:
        # In an open segment, a line that a power cut left unfinished was never acknowledged.
        if not (is_open and number in lines.holes):
            yield f"line {number} does not match its checksum"
    rest = raw[lines.whole :]
    # Neither was an unfinished last line; a whole one with a wrong end was.
    if rest and not (is_open and (decode_line(rest[:-1]) is None or has_hole(rest, lines.whole))):
        yield f"line {len(lines.values) + len(lines.damaged) + 1} has no end"
