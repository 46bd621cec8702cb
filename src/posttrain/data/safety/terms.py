"""Counting listed terms in texts, whole words only."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from pathlib import Path

import numpy as np
import numpy.typing as npt

from posttrain.data.records.words import plain_words
from posttrain.store.errors import UserError
from posttrain.store.text import read_text

# A word, in lower case, with a sign or a digit in the place of a letter.
_DISGUISED = re.compile(r"(?<![\w*#@$!])[a-z@$][\w*#@$!]*[*#@$!0-9][\w*#@$!]*", re.ASCII)
_LOOKALIKES = str.maketrans("013457@$!", "oieastasi")
_HIDDEN = re.compile(r"[*#]")


@dataclass(frozen=True)
class Terms:
    """Listed terms, each as its words in lower case.

    Attributes:
        by_first: by first word the terms that begin with it, as tuples of words.
        words: terms of one word.
    """

    by_first: dict[str, tuple[tuple[str, ...], ...]]
    words: frozenset[str]

    @classmethod
    def of(cls, lines: Iterable[str]) -> "Terms":
        """The terms of some lines; empty lines and those that begin with ``#`` are none."""
        terms = {tuple(term.split()) for term in plain_words(line for line in lines if not line.startswith("#"))}
        by_first: dict[str, tuple[tuple[str, ...], ...]] = {}
        for term in sorted(terms - {()}):
            by_first[term[0]] = (*by_first.get(term[0], ()), term)
        return cls(by_first, frozenset(term[0] for term in terms if len(term) == 1))


def read_terms(path: Path | None) -> Terms:
    """The terms of a file with one a line, or those that come with the program.

    Raises:
        UserError: the file is missing, is not UTF-8, or lists nothing.
    """
    if path is None:
        return Terms.of(files(__package__).joinpath("terms.txt").read_text(encoding="utf-8").splitlines())
    terms = Terms.of(read_text(path, str(path)).splitlines())
    if not terms.by_first:
        raise UserError("lists no term", where=str(path), fix="put one on a line")
    return terms


def hits(texts: Sequence[str], terms: Terms, *, disguised: bool = False) -> npt.NDArray[np.int64]:
    """Terms in each text, and its words: int64 [N, 2].

    Words are runs of letters and digits, whatever their case; a Chinese or Japanese character is a word. Terms that
    overlap all count.

    Args:
        disguised: whether words count whose letters are hidden behind ``*`` or ``#`` or replaced by digits and signs
            that look like them, if the first letter is there and at least half of them are.
    """
    counts = np.zeros((len(texts), 2), np.int64)
    for row, (text, plain) in enumerate(zip(texts, plain_words(texts), strict=True)):
        words = plain.split()
        counts[row, 1] = len(words)
        if not terms.by_first.keys().isdisjoint(words):
            counts[row, 0] = _listed(words, terms)
        if disguised:
            counts[row, 0] += sum(_reveals(word, terms.words) for word in _DISGUISED.findall(text.casefold()))
    return counts


def _listed(words: Sequence[str], terms: Terms) -> int:
    return sum(
        tuple(words[place : place + len(term)]) == term
        for place, word in enumerate(words)
        for term in terms.by_first.get(word, ())
    )


@lru_cache(100_000)
def _reveals(word: str, listed: frozenset[str]) -> bool:
    """Whether a disguised word is a listed one."""
    if not listed.isdisjoint(plain_words([word])[0].split()):
        return False  # not disguised, and counted already
    shown = word.rstrip("!").translate(_LOOKALIKES)
    if not _HIDDEN.search(shown):
        return shown in listed
    seen = len(_HIDDEN.sub("", shown))
    if shown[0] in "*#" or 2 * seen < len(shown):
        return False
    pattern = re.compile(_HIDDEN.sub("[a-z]", shown))
    return any(pattern.fullmatch(one) for one in listed)
