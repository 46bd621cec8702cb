"""The known name nearest to what the user wrote."""

import difflib
from collections.abc import Iterable


def nearest(word: str, known: Iterable[str], likeness: float = 0.0) -> str | None:
    """The known word most like ``word``, whatever their order; None when none is at least so like it.

    Args:
        likeness: difflib's ratio from which words count as alike, between 0 (any two) and 1 (equal ones).
    """
    found = difflib.get_close_matches(word, list(known), n=1, cutoff=likeness)
    return found[0] if found else None


def share_words(one: str, other: str) -> bool:
    """Whether all words of one name are in the other, as those of ``batch_size`` are in ``train_batch_size``."""
    words, others = set(one.split("_")), set(other.split("_"))
    return words <= others or others <= words


def did_you_mean(word: str, known: Iterable[str]) -> str | None:
    """A question naming the known word nearest to ``word``; None when nothing is known."""
    name = nearest(word, known)
    return None if name is None else f"did you mean `{name}`?"
