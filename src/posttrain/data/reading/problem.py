"""What is wrong with one place of a file."""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import islice

from posttrain.store.errors import UserError
from posttrain.store.nearest import did_you_mean

LONGEST_MESSAGE = 400
"""Characters."""


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


_OF_COLUMNS = ("missing column", "unknown shape", "mixed shapes", "too many columns")


def gathered(problems: Iterable[Problem]) -> Iterator[Problem]:
    """The problems, but what is wrong with the columns of many records of a file once, where it was found first."""
    found = list(problems)
    counts = Counter((one.file, one.kind, one.message) for one in found if one.kind in _OF_COLUMNS)
    for problem in found:
        count = counts.pop((problem.file, problem.kind, problem.message), 0)
        if problem.kind not in _OF_COLUMNS or count == 1:
            yield problem
        elif count:
            more = "1 more record" if count == 2 else f"{count - 1:,} more records"
            yield replace(problem, message=f"{problem.message} (the same in {more})")


def one_line(text: str) -> str:
    """``text`` for a terminal: one line without control characters, shortened in the middle."""
    line = " ".join(text[: 4 * LONGEST_MESSAGE].split())
    line = "".join(character if character.isprintable() else "\ufffd" for character in line)
    if len(line) <= LONGEST_MESSAGE:
        return line
    return f"{line[: LONGEST_MESSAGE * 2 // 3]} ... {line[-LONGEST_MESSAGE // 3 :]}"


def shortened(word: str, longest: int = 60) -> str:
    """A word of the user's as messages show it."""
    return word if len(word) <= longest else f"{word[: longest - 3]}..."


def listed(words: Collection[str], most: int = 8) -> str:
    """Words of the user's with commas between them; of many only the first."""
    shown = ", ".join(shortened(word) for word in islice(words, most))
    return shown if len(words) <= most else f"{shown} and {len(words) - most:,} more"


def unknown_label(label: str, labels: Iterable[str], file: str, line: int) -> Problem:
    """The problem of an answer that the closed label set does not hold."""
    message = f"label `{shortened(label)}` is not in the label set"
    return Problem(file, line, "unknown label", message, did_you_mean(label[:100], labels))
