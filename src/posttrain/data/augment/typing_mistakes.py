"""Typing mistakes: a neighbouring key, a dropped, doubled or swapped letter."""

import re

import numpy as np

_ROWS = ("qwertyuiop", "asdfghjkl", "zxcvbnm")
_WORD = re.compile(r"(?<![\w@.£#-])[A-Za-z]{4,}(?![\w@-])")


def neighbours(letter: str) -> str:
    """The letters beside this one on a QWERTY keyboard, left and right."""
    row = next(row for row in _ROWS if letter in row)
    at = row.index(letter)
    return row[max(at - 1, 0) : at] + row[at + 1 : at + 2]


def add_typo(text: str, rng: np.random.Generator, known: set[str]) -> str:
    """The text with one word of at least four letters mistyped, never into a word of ``known`` (case-folded).

    A text without such a word comes back as it is.
    """
    places = list(_WORD.finditer(text))
    if not places:
        return text
    while True:
        place = places[rng.integers(len(places))]
        wrong = _mistype(place[0], rng)
        if wrong.casefold() not in known:
            return text[: place.start()] + wrong + text[place.end() :]


def _mistype(word: str, rng: np.random.Generator) -> str:
    at = int(rng.integers(1, len(word) - 1))  # first and last letters are seldom mistyped
    kind = rng.integers(4)
    if kind == 0:
        beside = neighbours(word[at].lower())
        return word[:at] + beside[rng.integers(len(beside))] + word[at + 1 :]
    if kind == 1:
        return word[:at] + word[at + 1 :]
    if kind == 2:
        return word[:at] + word[at] + word[at:]
    return word[:at] + word[at + 1] + word[at] + word[at + 2 :]
