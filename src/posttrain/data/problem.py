"""What is wrong with one place of a file."""

from collections.abc import Iterable
from dataclasses import dataclass

from posttrain.store.errors import UserError
from posttrain.store.nearest import did_you_mean


@dataclass(frozen=True)
class Problem:
    """Attributes:
    file: the file as the user named it.
    line: 1-based line (row in Parquet and Arrow); None where the file as a whole is meant.
    kind: one of a few words that problems are counted by, such as ``broken JSON``.
    message: what is wrong here.
    fix: what the user can do about it.
    """

    file: str
    line: int | None
    kind: str
    message: str
    fix: str | None = None

    def error(self) -> UserError:
        """The problem as the error that ends a command."""
        where = self.file if self.line is None else f"{self.file}:{self.line}"
        return UserError(self.message, where=where, fix=self.fix)


def unknown_label(label: str, labels: Iterable[str], file: str, line: int) -> Problem:
    """The problem of an answer that the closed label set does not hold."""
    message = f"label `{label}` is not in the label set"
    return Problem(file, line, "unknown label", message, did_you_mean(label, labels))
