"""A row of a file before it is a record."""

import json
from collections.abc import Iterator
from typing import Any, NamedTuple

from posttrain.data.reading.problem import Problem


class Row(NamedTuple):
    """One record as the file holds it. ``line`` is 1-based: where a text record starts, or the row number."""

    line: int
    values: dict[str, Any]


Rows = Iterator[Row | Problem]

DEEPEST = 100
"""Levels of lists and objects in one record; Python's own limit depends on who calls."""


MOST_COLUMNS = 1_000
"""Columns of one file; one with more is no table of records, whatever its format."""


class BadFile(Exception):
    """A file that cannot be read on from here."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem.message)
        self.problem = problem


def checked(value: Any, name: str, line: int) -> Row | Problem:
    """``value`` as a row if it is an object whose texts can be stored."""
    if not isinstance(value, dict):
        return Problem(name, line, "not an object", "a record must be a JSON object")
    wrong = _wrong(value, 1)
    if wrong is None:
        return Row(line, value)
    kind, message, fix = wrong
    return Problem(name, line, kind, message, fix)


def json_in(text: str) -> Any:
    """What a text holds as JSON; None where it is not JSON, or nothing that a row could hold."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if _wrong(value, 1) is None else None


def nul_bytes(name: str, line: int) -> Problem:
    """The problem of text with a NUL in it, which databases and tokenizers refuse."""
    message = "holds a NUL character, which is no text"
    return Problem(name, line, "encoding", message, "save the file as UTF-8, without NUL characters")


def not_utf8(raw: bytes, name: str, line: int) -> Problem:
    """The problem of bytes that are not UTF-8."""
    message = "the file is UTF-16, not UTF-8" if is_utf16(raw) else "holds bytes that are not UTF-8"
    return Problem(name, line, "encoding", message, "save the file as UTF-8")


def is_utf16(raw: bytes) -> bool:
    """Whether a file that starts so is UTF-16: by its byte order mark, or by the NUL in its first character."""
    return raw[:2] in (b"\xff\xfe", b"\xfe\xff") or (b"\0" in raw[:2] and raw[:2] != b"\0\0")


def _wrong(value: Any, level: int) -> tuple[str, str, str | None] | None:
    """Kind, message and fix of what cannot be stored: a lone surrogate, too many levels."""
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            return "encoding", "holds bytes or characters that are not UTF-8", "save the file as UTF-8"
        return None
    if not isinstance(value, dict | list):
        return None
    if level > DEEPEST:
        return "broken JSON", f"broken JSON: nested too deeply (over {DEEPEST} levels)", None
    if isinstance(value, dict):
        for key in value:
            if found := _wrong(key, level):
                return found
    for inner in value.values() if isinstance(value, dict) else value:
        if found := _wrong(inner, level + 1):
            return found
    return None
