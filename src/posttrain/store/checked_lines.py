"""JSON lines that carry a checksum of themselves, so that what a crash cut off or a disk damaged is known by line.

A line is ``{"checksum":"<16 hex digits>",...}``: the XXH3 (64 bits) of every byte between the comma and the line's end.
It stays JSON, which any tool reads.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import xxhash

_START = b'{"checksum":"'
_PREFIX_BYTES = len(_START) + 16 + len(b'",')


@dataclass
class CheckedLines:
    """What stands in a file of checked lines.

    Attributes:
        values: of every whole line, without its checksum.
        numbers: the 1-based lines that they stand on.
        damaged: 1-based numbers of the lines that are not what was written, but for a torn last one.
        whole: bytes up to the end of the last line that has an end; what follows was never finished.
    """

    values: list[dict[str, Any]] = field(default_factory=list)
    numbers: list[int] = field(default_factory=list)
    damaged: list[int] = field(default_factory=list)
    whole: int = 0


def encode_line(value: Mapping[str, Any]) -> bytes:
    """One line of a non-empty object, with its end.

    Raises:
        ValueError: a number is not finite, or a text is not Unicode (a lone surrogate).
    """
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    rest = text[1:].encode()
    return b'%s%s",%s\n' % (_START, xxhash.xxh3_64_hexdigest(rest).encode(), rest)


def decode_line(line: bytes) -> dict[str, Any] | None:
    """The object of a line without its end; None if it is not what was written."""
    rest = line[_PREFIX_BYTES:]
    if line[:_PREFIX_BYTES] != b'%s%s",' % (_START, xxhash.xxh3_64_hexdigest(rest).encode()):
        return None
    value: dict[str, Any] = json.loads(b"{" + rest)
    return value


def read_lines(raw: bytes) -> CheckedLines:
    """Every line of a file's bytes."""
    lines = CheckedLines(whole=raw.rfind(b"\n") + 1)
    for number, line in enumerate(raw[: lines.whole].split(b"\n")[:-1], 1):
        value = decode_line(line)
        if value is None:
            lines.damaged.append(number)
        else:
            lines.values.append(value)
            lines.numbers.append(number)
    return lines
