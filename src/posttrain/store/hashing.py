"""JSON and its checksums: canonical JSON with its digest, and JSON lines that carry a checksum each.

Equal content has an equal digest on every machine. A checked line is ``{"checksum":"<16 hex digits>",...}``: the XXH3
(64 bits) of every byte between the comma and the line's end, so that a line that a crash cut off or a disk damaged is
recognised. It stays JSON, which any tool reads.
"""

import hashlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import xxhash

_START = b'{"checksum":"'
_PREFIX_BYTES = len(_START) + 16 + len(b'",')

_SECTOR = 512


def canonical_json(value: Any) -> bytes:
    """Returns the canonical JSON of ``value``: keys sorted, no spaces, ASCII; tuples are written as lists.

    Raises:
        TypeError: something in ``value`` has no JSON form, such as a NumPy integer or a key that is not a
            string; the message names where it is.
        ValueError: a number is not finite.
    """
    # `json` would write a key 1 as "1" and NaN as NaN: two different values could then share an id.
    _check(value, "value")
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False).encode()


def digest(value: Any) -> str:
    """Returns the SHA-256 of the canonical JSON of ``value``, 64 hex characters."""
    return hashlib.sha256(canonical_json(value)).hexdigest()


def file_digest(path: Path) -> str:
    """Returns the SHA-256 of a file's bytes, 64 hex characters."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def file_stats(path: Path) -> list[list[str | int]]:
    """Returns name, size and time of a file, or of a folder's files, to notice that one has changed."""
    # In place of a digest: hashing gigabytes of a base model would take longer than the work that it guards.
    files = [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.is_file())
    return [[file.name, file.stat().st_size, file.stat().st_mtime_ns] for file in files]


def _check(value: Any, location: str) -> None:
    if isinstance(value, Mapping):
        if not isinstance(value, dict):
            raise TypeError(f"{location}: {type(value).__name__} has no JSON form")
        for key, inner in value.items():
            if not isinstance(key, str):
                raise TypeError(f"{location}: key {key!r} is not a string")
            _check(inner, f"{location}.{key}")
    elif isinstance(value, list | tuple):
        for index, inner in enumerate(value):
            _check(inner, f"{location}[{index}]")
    elif isinstance(value, float):
        if not math.isfinite(value):
            raise ValueError(f"{location}: {value} is not finite")
    elif value is not None and not isinstance(value, str | bool | int):
        raise TypeError(f"{location}: {type(value).__name__} has no JSON form")


@dataclass
class CheckedLines:
    """The content of a file of checked lines.

    Attributes:
        values: Objects of the intact lines, without their checksums.
        numbers: 1-based line number of each value.
        damaged: 1-based numbers of the lines whose checksum does not match, or that are not JSON; an unfinished last
            line is not among them.
        holes: Those of the damaged lines that `has_hole`.
        whole: Bytes up to the end of the last finished line; what follows is an unfinished write.
    """

    values: list[dict[str, Any]] = field(default_factory=list)
    numbers: list[int] = field(default_factory=list)
    damaged: list[int] = field(default_factory=list)
    holes: list[int] = field(default_factory=list)
    whole: int = 0


def encode_line(value: Mapping[str, Any]) -> bytes:
    """Encodes a non-empty object as one line, with its end.

    Raises:
        ValueError: a number is not finite, or a text is not Unicode (a lone surrogate).
    """
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    # Over the bytes as they are, not over parsed values: the check needs no parsing, and no rule of how to write JSON.
    rest = text[1:].encode()
    return b'%s%s",%s\n' % (_START, xxhash.xxh3_64_hexdigest(rest).encode(), rest)


def decode_line(line: bytes) -> dict[str, Any] | None:
    """Returns the object of a line without its end; None if the checksum does not match, or the line is not JSON."""
    rest = line[_PREFIX_BYTES:]
    if line[:_PREFIX_BYTES] != b'%s%s",' % (_START, xxhash.xxh3_64_hexdigest(rest).encode()):
        return None
    try:
        value: dict[str, Any] = json.loads(b"{" + rest)
    except (ValueError, RecursionError):
        return None  # another program's line, or a deeply nested one: a checksum proves no meaning
    return value


def has_hole(line: bytes, offset: int) -> bool:
    """Returns whether a line lacks whole sectors, which a power cut amid a write leaves as NUL bytes.

    Args:
        line: A line without its end.
        offset: Its position in the file.
    """
    # A disk writes sectors in any order. No encoded line holds a NUL, and one flipped bit makes no aligned run of them.
    for run in re.finditer(b"\0+", line):
        starts = run.start() == 0 or (offset + run.start()) % _SECTOR == 0
        if starts and (run.end() == len(line) or (offset + run.end()) % _SECTOR == 0):
            return True
    return False


def read_lines(raw: bytes) -> CheckedLines:
    """Reads every line of a file's bytes."""
    # A last line without its end was being written when the process died: it was never confirmed, so it is not damage.
    lines, position = CheckedLines(whole=raw.rfind(b"\n") + 1), 0
    ends: list[int] = []
    for number, line in enumerate(raw[: lines.whole].split(b"\n")[:-1], 1):
        value = decode_line(line)
        if value is not None:
            lines.values.append(value)
            lines.numbers.append(number)
        else:
            lines.damaged.append(number)
            if has_hole(line, position):
                lines.holes.append(number)
        position += len(line) + 1
        ends.append(position)
    # A line with its end but with NUL sectors inside was never confirmed either.
    while ends and lines.holes[-1:] == [len(ends)]:
        lines.holes.pop()
        lines.damaged.pop()
        ends.pop()
        lines.whole = ends[-1] if ends else 0
    return lines
