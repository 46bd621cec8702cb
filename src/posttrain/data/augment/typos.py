"""Adds typing mistakes: a neighbouring key, a dropped, doubled or swapped letter."""

import re
from typing import Literal

import numpy as np
from pydantic import Field

from posttrain.data.augment.method import AugmentMethod, Generators

_KEYBOARD_ROWS = ("qwertyuiop", "asdfghjkl", "zxcvbnm")

_WORD = re.compile(r"(?<![\w@.£#-])[A-Za-z]{4,}(?![\w@-])")


class Typos(AugmentMethod):
    """Mistypes words as on a keyboard; words with digits, addresses and short words stay."""

    method: Literal["typos"] = "typos"
    words: int = Field(1, ge=1, description="Words that are mistyped, one after the other.")

    def texts(self, texts: list[str], labels: list[str | None], rngs: Generators, copy: int) -> list[str | None]:
        return [self._mistyped(text, rng) for text, rng in zip(texts, rngs, strict=True)]

    def _mistyped(self, text: str, rng: np.random.Generator) -> str:
        for _ in range(self.words):
            text = add_typo(text, rng, set())
        return text


def adjacent_keys(letter: str) -> str:
    """Return the letters to the left and right of a letter on a QWERTY keyboard."""
    row = next(row for row in _KEYBOARD_ROWS if letter in row)
    at = row.index(letter)
    return row[max(at - 1, 0) : at] + row[at + 1 : at + 2]


def add_typo(text: str, rng: np.random.Generator, known: set[str]) -> str:
    """Mistype one word of at least four letters, never into a word of ``known`` (case-folded).

    A text without such a word is returned unchanged.
    """
    matches = list(_WORD.finditer(text))
    if not matches:
        return text
    while True:
        match = matches[rng.integers(len(matches))]
        wrong = _mistyped_word(match[0], rng)
        if wrong.casefold() not in known:
            return text[: match.start()] + wrong + text[match.end() :]


def _mistyped_word(word: str, rng: np.random.Generator) -> str:
    at = int(rng.integers(1, len(word) - 1))  # first and last letters are seldom mistyped
    kind = rng.integers(4)
    if kind == 0:
        beside = adjacent_keys(word[at].lower())
        return word[:at] + beside[rng.integers(len(beside))] + word[at + 1 :]
    if kind == 1:
        return word[:at] + word[at + 1 :]
    if kind == 2:
        return word[:at] + word[at] + word[at:]
    return word[:at] + word[at + 1] + word[at] + word[at + 2 :]
