"""A row of a file, or the problem that is found in its place."""

import json
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, NamedTuple

from posttrain.store.errors import UserError, suggest

MAX_MESSAGE = 400
"""Characters."""

_COLUMN_KINDS = ("missing column", "unknown shape", "mixed shapes", "too many columns")

MAX_DEPTH = 100
"""Levels of lists and objects in one record; Python's own limit depends on who calls."""

MAX_COLUMNS = 1_000
"""Columns of one file; one with more is no table of records, whatever its format."""


@dataclass(frozen=True)
class Problem:
    """Attributes:
    file: the file as the user named it.
    line: 1-based line (row in Parquet and Arrow); None where the file as a whole is meant.
    kind: one of a few words that problems are counted by, such as ``broken JSON``.
    message: what is wrong here.
    fix: what the user can do about it.
    blocking: whether a file with it is refused; what no file of its kind is free of, such as the failed requests
        of a log, is left out and counted instead.
    """

    file: str
    line: int | None
    kind: str
    message: str
    fix: str | None = None
    blocking: bool = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "message", one_line(self.message))
        object.__setattr__(self, "fix", self.fix and one_line(self.fix))

    def error(self) -> UserError:
        """The problem as the error that ends a command."""
        where = self.file if self.line is None else f"{self.file}:{self.line}"
        return UserError(self.message, where=where, fix=self.fix)


def group_problems(problems: Iterable[Problem]) -> Iterator[Problem]:
    """The problems, but what is wrong with the columns of many records of a file once, where it was found first."""
    found = list(problems)
    counts = Counter((one.file, one.kind, one.message) for one in found if one.kind in _COLUMN_KINDS)
    for problem in found:
        count = counts.pop((problem.file, problem.kind, problem.message), 0)
        if problem.kind not in _COLUMN_KINDS or count == 1:
            yield problem
        elif count:
            more = "1 more record" if count == 2 else f"{count - 1:,} more records"
            yield replace(problem, message=f"{problem.message} (the same in {more})")


def one_line(text: str) -> str:
    """``text`` for a terminal: one line without control characters, shortened in the middle."""
    line = " ".join(text[: 4 * MAX_MESSAGE].split())
    line = "".join(character if character.isprintable() else "\ufffd" for character in line)
    if len(line) <= MAX_MESSAGE:
        return line
    return f"{line[: MAX_MESSAGE * 2 // 3]} ... {line[-MAX_MESSAGE // 3 :]}"


def shorten(word: str, longest: int = 60) -> str:
    """A word of the user's as messages show it."""
    return word if len(word) <= longest else f"{word[: longest - 3]}..."


def join_names(words: Collection[str], most: int = 8) -> str:
    """Words of the user's with commas between them; of many only the first."""
    shown = ", ".join(shorten(word) for word in islice(words, most))
    return shown if len(words) <= most else f"{shown} and {len(words) - most:,} more"


def unknown_label_problem(label: str, labels: Iterable[str], file: str, line: int) -> Problem:
    """The problem of an answer that the closed label set does not hold."""
    message = f"label `{shorten(label)}` is not in the label set"
    return Problem(file, line, "unknown label", message, suggest(label[:100], labels))


class Row(NamedTuple):
    """One record as the file holds it. ``line`` is 1-based: where a text record starts, or the row number."""

    line: int
    values: dict[str, Any]


Rows = Iterator[Row | Problem]


class BadFile(Exception):
    """A file that cannot be read on from here."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem.message)
        self.problem = problem


def check_row(value: Any, name: str, line: int) -> Row | Problem:
    """``value`` as a row if it is an object whose texts can be stored."""
    if not isinstance(value, dict):
        return Problem(name, line, "not an object", "a record must be a JSON object")
    wrong = _invalid_value(value, 1)
    if wrong is None:
        return Row(line, value)
    kind, message, fix = wrong
    return Problem(name, line, kind, message, fix)


def parse_json(text: str) -> Any:
    """What a text holds as JSON; None where it is not JSON, or nothing that a row could hold."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if _invalid_value(value, 1) is None else None


def nul_problem(name: str, line: int) -> Problem:
    """The problem of text with a NUL in it, which databases and tokenizers refuse."""
    message = "holds a NUL character, which is no text"
    return Problem(name, line, "encoding", message, "save the file as UTF-8, without NUL characters")


def not_utf8_problem(raw: bytes, name: str, line: int) -> Problem:
    """The problem of bytes that are not UTF-8."""
    message = "the file is UTF-16, not UTF-8" if is_utf16(raw) else "holds bytes that are not UTF-8"
    return Problem(name, line, "encoding", message, "save the file as UTF-8")


def is_utf16(raw: bytes) -> bool:
    """Whether a file that starts so is UTF-16: by its byte order mark, or by the NUL in its first character."""
    return raw[:2] in (b"\xff\xfe", b"\xfe\xff") or (b"\0" in raw[:2] and raw[:2] != b"\0\0")


def _invalid_value(value: Any, level: int) -> tuple[str, str, str | None] | None:
    """Kind, message and fix of what cannot be stored: a lone surrogate, too many levels."""
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            return "encoding", "holds bytes or characters that are not UTF-8", "save the file as UTF-8"
        return None
    if not isinstance(value, dict | list):
        return None
    if level > MAX_DEPTH:
        return "broken JSON", f"broken JSON: nested too deeply (over {MAX_DEPTH} levels)", None
    if isinstance(value, dict):
        for key in value:
            if found := _invalid_value(key, level):
                return found
    for inner in value.values() if isinstance(value, dict) else value:
        if found := _invalid_value(inner, level + 1):
            return found
    return None
