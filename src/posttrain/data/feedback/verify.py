"""Verifies the segments of an inbox; reads only, whether a process has the inbox open or none."""

from collections.abc import Iterator
from pathlib import Path

from posttrain.data.feedback.segment import open_segment_path, sealed_segments
from posttrain.store.checked_lines import decode_line, read_lines


def count_entries(inbox: Path) -> int:
    """Counts the acknowledged entries."""
    return sum(len(read_lines(path.read_bytes()).values) for path in _segments(inbox))


def inbox_problems(inbox: Path, *, quick: bool = False) -> Iterator[tuple[Path, str]]:
    """Yields each damaged segment and what is wrong with it.

    Args:
        inbox: The inbox's folder.
        quick: True reads no segment: only missing and empty ones are detected.
    """
    numbers = [int(path.stem) for path in _segments(inbox)]
    for number in range(1, max(numbers, default=0)):
        if number not in numbers:
            yield open_segment_path(inbox, number).with_suffix(".jsonl"), "is missing"
    for mark in sorted((inbox / "segments").glob("[0-9]*.taken")):
        if int(mark.stem) not in numbers:
            yield mark.with_suffix(".jsonl"), "is missing, although its records were taken"
    for path in _segments(inbox):
        if path.suffix == ".jsonl" and not path.stat().st_size:
            yield path, "is empty"
        elif not quick:
            yield from ((path, problem) for problem in _segment_problems(path))


def _segments(inbox: Path) -> list[Path]:
    return sorted([*sealed_segments(inbox), *(inbox / "segments").glob("[0-9]*.open")])


def _segment_problems(path: Path) -> Iterator[str]:
    raw = path.read_bytes()
    lines = read_lines(raw)
    for number in lines.damaged:
        yield f"line {number} does not match its checksum"
    rest = raw[lines.whole :]
    # In an open segment an unfinished last line was never acknowledged; a whole one with a wrong end was.
    if rest and (path.suffix == ".jsonl" or decode_line(rest[:-1]) is not None):
        yield f"line {len(lines.values) + len(lines.damaged) + 1} has no end"
