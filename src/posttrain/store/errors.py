"""The errors that every part of the program raises, their exit codes, and "did you mean" suggestions."""

import difflib
from collections.abc import Iterable


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


class WorkError(Exception):
    """The call was right and the work failed: one clear line, exit code 1."""


class DamagedArtifactError(WorkError):
    """An artifact's files no longer match their checksums."""


class Waiting(Exception):
    """A stage waits for input, such as labels; not a failure, exit code 0.

    Args:
        what: One line that names the missing input, such as ``labels for round 2 in batch.csv``.
    """


def is_user_mistake(error: BaseException | None) -> bool:
    """Returns whether the user must change something; work begun on such an input is useless and is removed."""
    return isinstance(error, UserError) and not isinstance(error, StorageError)


def closest_match(word: str, candidates: Iterable[str], cutoff: float = 0.0) -> str | None:
    """Returns the candidate most similar to ``word``; None if none reaches the cutoff.

    Args:
        cutoff: Difflib's ratio from which words count as similar, between 0 (any two) and 1 (equal ones).
    """
    matches = difflib.get_close_matches(word, list(candidates), n=1, cutoff=cutoff)
    return matches[0] if matches else None


def share_words(first: str, second: str) -> bool:
    """Returns whether all words of one name are in the other, as ``batch_size`` in ``train_batch_size``."""
    first_words, second_words = set(first.split("_")), set(second.split("_"))
    return first_words <= second_words or second_words <= first_words


def suggest(word: str, names: Iterable[str]) -> str | None:
    """Returns a question that suggests the name most similar to ``word``; None if there are no names."""
    name = closest_match(word, names)
    return None if name is None else f"did you mean `{name}`?"
