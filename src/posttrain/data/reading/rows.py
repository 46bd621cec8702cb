"""Rows of a file before they are records, and the problems that take the place of bad rows."""

import json
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, NamedTuple

from posttrain.store.errors import UserError, shorten, suggest, to_line

MAX_MESSAGE = 400
"""Characters of a message that reaches a terminal."""

COLUMN_KINDS = ("missing column", "unknown shape", "mixed shapes", "too many columns")
"""Kinds of problems with columns: in a file whose rows share their columns, all of them have it."""

# Python's own recursion limit depends on the depth of the caller: the same file could pass in one command and fail in
# another.
MAX_DEPTH = 100
"""Levels of lists and objects in one record."""

MAX_COLUMNS = 1_000
"""Columns of one file; a file with more holds no records, whatever its format."""


@dataclass(frozen=True)
class Problem:
    """A problem with one line of a file, or with the whole file.

    Attributes:
        file: the file as the user named it.
        line: 1-based line (row in Parquet and Arrow); None for the file as a whole.
        kind: category by which problems are counted, such as ``broken JSON``.
        message: the problem, for the user.
        fix: the remedy, for the user.
        blocking: whether the file is refused. Problems that every file of a kind has, such as the failed requests of
            a log, do not block: these rows are skipped and counted.
    """

    file: str
    line: int | None
    kind: str
    message: str
    fix: str | None = None
    blocking: bool = True

    def __post_init__(self) -> None:
        # Messages quote the user's file, which may hold line breaks and escape sequences of a terminal.
        object.__setattr__(self, "message", one_line(self.message))
        object.__setattr__(self, "fix", self.fix and one_line(self.fix))

    def error(self) -> UserError:
        """Returns the problem as the error that ends a command."""
        where = self.file if self.line is None else f"{self.file}:{self.line}"
        return UserError(self.message, where=where, fix=self.fix)


def group_problems(problems: Iterable[Problem]) -> Iterator[Problem]:
    """Yields the first problem of each kind in each file, with the number of the others in its message."""
    # A million equal lines would hide all other problems.
    groups: dict[tuple[str, str], list[Problem]] = {}
    for problem in problems:
        groups.setdefault((problem.file, problem.kind), []).append(problem)
    for first, *others in groups.values():
        yield with_count(first, [other.message == first.message for other in others])


def with_count(first: Problem, others: Iterable[bool], hint: str = "") -> Problem:
    """Returns the first problem of a kind in a file, with the number of the others in its message.

    Args:
        others: for each other problem of the kind, whether its message is the same.
        hint: names the command that lists them all.
    """
    counts = Counter(others)
    if not counts:
        return first
    count = counts.total()
    more = "1 more record" if count == 1 else f"{count:,} more records"
    text = f"and {more} of this kind" if counts[False] else f"the same in {more}"
    return replace(first, message=f"{first.message} ({text}{hint and '; '}{hint})")


def list_command(file: str) -> str:
    """Returns the hint that names the command for all problems of a file."""
    return f"`posttrain data check {shorten(file, 200)} --all` lists them"


def one_line(text: str) -> str:
    """Formats a text for a terminal: one line without control characters, shortened in the middle."""
    # Cut first: a message may quote a line of 64 MiB.
    line = to_line(text[: 4 * MAX_MESSAGE])
    if len(line) <= MAX_MESSAGE:
        return line
    return f"{line[: MAX_MESSAGE * 2 // 3]} ... {line[-MAX_MESSAGE // 3 :]}"


def join_names(names: Collection[str], most: int = 8) -> str:
    """Joins names with commas, the first ones if there are many."""
    text = ", ".join(shorten(name) for name in islice(names, most))
    return text if len(names) <= most else f"{text} and {len(names) - most:,} more"


def unknown_label_problem(label: str, labels: Iterable[str], file: str, line: int) -> Problem:
    """Returns the problem of an answer outside the closed label set."""
    message = f"label `{shorten(label)}` is not in the label set"
    return Problem(file, line, "unknown label", message, suggest(label[:100], labels))


class Row(NamedTuple):
    """One row as the file holds it. ``line`` is 1-based: the line where it starts, or the row number in Parquet."""

    line: int
    values: dict[str, Any]


Rows = Iterator[Row | Problem]


class BadFile(Exception):
    """Raised where the rest of a file cannot be read."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem.message)
        self.problem = problem


def check_row(value: Any, name: str, line: int) -> Row | Problem:
    """Returns a row if the value is an object that can be stored, else the problem."""
    if not isinstance(value, dict):
        return Problem(name, line, "not an object", "a record must be a JSON object")
    wrong = _invalid_value(value, 1)
    if wrong is None:
        return Row(line, value)
    kind, message, fix = wrong
    return Problem(name, line, kind, message, fix)


def parse_json(text: str) -> Any:
    """Parses JSON; returns None if the text is not JSON, or JSON that a row cannot hold."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if _invalid_value(value, 1) is None else None


def nul_problem(name: str, line: int) -> Problem:
    """Returns the problem of a NUL character, which databases and tokenizers refuse."""
    message = "holds a NUL character, which is not text"
    return Problem(name, line, "encoding", message, "save the file as UTF-8, without NUL characters")


def not_utf8_problem(raw: bytes, name: str, line: int) -> Problem:
    """Returns the problem of bytes that are not UTF-8."""
    message = "the file is UTF-16, not UTF-8" if is_utf16(raw) else "holds bytes that are not UTF-8"
    return Problem(name, line, "encoding", message, "save the file as UTF-8")


def is_utf16(raw: bytes) -> bool:
    """Returns True if a file starts like UTF-16: with a byte order mark, or a NUL in the first character."""
    # Two NUL characters are not UTF-16 but binary data.
    return raw[:2] in (b"\xff\xfe", b"\xfe\xff") or (b"\0" in raw[:2] and raw[:2] != b"\0\0")


def _invalid_value(value: Any, level: int) -> tuple[str, str, str | None] | None:
    """Returns kind, message and fix of a value that cannot be stored: a lone surrogate, or too many levels."""
    if isinstance(value, str):
        try:
            # A lone surrogate is valid in Python and in JSON escapes, but no UTF-8 can hold it.
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
            if invalid := _invalid_value(key, level):
                return invalid
    for inner in value.values() if isinstance(value, dict) else value:
        if invalid := _invalid_value(inner, level + 1):
            return invalid
    return None
