"""JSON lines with a checksum each, so that a line that a crash cut off or a disk damaged is recognised.

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
    """The content of a file of checked lines.

    Attributes:
        values: Objects of the intact lines, without their checksums.
        numbers: 1-based line number of each value.
        damaged: 1-based numbers of the lines whose checksum does not match, or that are no JSON; an unfinished last
            line is not among them.
        whole: Bytes up to the last line end; what follows is an unfinished write.
    """

    values: list[dict[str, Any]] = field(default_factory=list)
    numbers: list[int] = field(default_factory=list)
    damaged: list[int] = field(default_factory=list)
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
    """Returns the object of a line without its end; None if the checksum does not match, or the line is no JSON."""
    rest = line[_PREFIX_BYTES:]
    if line[:_PREFIX_BYTES] != b'%s%s",' % (_START, xxhash.xxh3_64_hexdigest(rest).encode()):
        return None
    try:
        value: dict[str, Any] = json.loads(b"{" + rest)
    except (ValueError, RecursionError):
        return None  # another program's line, or a deeply nested one: a checksum proves no meaning
    return value


def read_lines(raw: bytes) -> CheckedLines:
    """Reads every line of a file's bytes."""
    # A last line without its end was being written when the process died: it was never confirmed, so it is no damage.
    lines = CheckedLines(whole=raw.rfind(b"\n") + 1)
    for number, line in enumerate(raw[: lines.whole].split(b"\n")[:-1], 1):
        value = decode_line(line)
        if value is None:
            lines.damaged.append(number)
        else:
            lines.values.append(value)
            lines.numbers.append(number)
    return lines
