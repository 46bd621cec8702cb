"""The errors that every part of the program raises, their exit codes, and "did you mean" suggestions."""

import difflib
from collections.abc import Iterable

SIMILAR = 0.6
"""Difflib's ratio from which a name is suggested for a mistyped one, as Python's own suggestions have it."""

_LISTED = 8  # names that are listed where none is similar

_COMPARED = 100  # characters of a name that are compared with others


class UserError(Exception):
    """A mistake in the call, the config or the input: one clear line, exit code 2.

    Args:
        what: The mistake, in a few words.
        where: A file with its line (``pool.csv:12``) or a config key (``train.epochs``).
        fix: Remedy for the user.
        key: The config key, if ``where`` is the file or the option that sets it.
    """

    def __init__(self, what: str, *, where: str | None = None, fix: str | None = None, key: str | None = None) -> None:
        self.what, self.where, self.fix, self.key = what, where, fix, key
        line = f"{where}: {what}" if where else what
        super().__init__(f"{line}; {fix}" if fix else line)


class StorageError(UserError):
    """A disk, a database or a server refused; the call may be right, so finished work is kept to resume from."""


class DatabaseAwayError(StorageError):
    """The database cannot be reached: its address is wrong, or it is away and the same call may work later."""


class WorkError(Exception):
    """The call was right and the work failed: one clear line, exit code 1."""


class DamagedArtifactError(WorkError):
    """An artifact's files no longer match their checksums."""


class DamagedDatabaseError(WorkError):
    """The database's file cannot be read as a database."""


class EmptyDatabaseError(UserError):
    """There is no database, or it has no tables."""


class LostDatabaseError(UserError):
    """The database is gone, or older than its journal: the workspace has work that it does not know."""


class MovedWorkspaceError(UserError):
    """The workspace's folder was moved, replaced or removed while a process worked in it.

    Args:
        root: Where it was.
    """

    def __init__(self, root: object) -> None:
        what = "the workspace was moved, replaced or removed while posttrain worked in it"
        super().__init__(what, where=str(root), fix="run the command again where it is now")


class LockedError(UserError):
    """Another process holds the lock that the work needs."""


class Waiting(Exception):
    """A stage waits for input, such as labels; not a failure, exit code 0.

    Args:
        what: One line that names the missing input, such as ``labels for round 2 in batch.csv``.
    """

    def __init__(self, what: str) -> None:
        super().__init__(what)
        self.what = what


def is_user_mistake(error: BaseException | None) -> bool:
    """Returns whether the user must change something; work begun on such an input is useless and is removed."""
    return isinstance(error, UserError) and not isinstance(error, StorageError)


def to_line(text: str) -> str:
    """Puts a text on one line, without the control characters and escape sequences that a terminal would obey."""
    line = " ".join(text.split())
    return "".join(character if character.isprintable() else "\ufffd" for character in line)


def shorten(value: str, longest: int = 60) -> str:
    """Shortens a value of the user's for a message."""
    return value if len(value) <= longest else f"{value[: longest - 3]}..."


def closest_match(word: str, candidates: Iterable[str], cutoff: float = 0.0) -> str | None:
    """Returns the candidate most similar to ``word``; None if none reaches the cutoff.

    Args:
        cutoff: Difflib's ratio from which words count as similar, between 0 (any two) and 1 (equal ones).
    """
    # Compared by their beginnings: the time grows with the product of the lengths, and a name may be a megabyte.
    names = {name[:_COMPARED]: name for name in candidates}
    matches = difflib.get_close_matches(word[:_COMPARED], list(names), n=1, cutoff=cutoff)
    return names[matches[0]] if matches else None


def share_words(first: str, second: str) -> bool:
    """Returns whether all words of one name are in the other, as ``batch_size`` in ``train_batch_size``."""
    first_words, second_words = set(first.split("_")), set(second.split("_"))
    return first_words <= second_words or second_words <= first_words


def suggest(word: str, names: Iterable[str], *, listed: bool = True) -> str | None:
    """Returns a question that suggests the name most similar to ``word``; the first names if none is similar.

    Args:
        listed: False to return None if no name is similar, where the names are listed already.

    Returns:
        None also if there are no names.
    """
    known = list(dict.fromkeys(names))
    if (name := closest_match(word, known, SIMILAR)) is not None:
        return f"did you mean `{name}`?"
    if not listed or not known:
        return None
    more = f" and {len(known) - _LISTED:,} more" if len(known) > _LISTED else ""
    return f"one of {', '.join(map(shorten, known[:_LISTED]))}{more}"
