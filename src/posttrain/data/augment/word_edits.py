"""Edits single words: typing mistakes, synonyms and blanks.

Synonyms follow Zhang et al. 2015 (arXiv:1509.01626), their rate Wei & Zou 2019 (arXiv:1901.11196). Blanks follow Xie et
al. 2017, "Data Noising as Smoothing in Neural Network Language Models" (arXiv:1703.02573).
"""

import re
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
from pydantic import Field

from posttrain.data.augment.method import AugmentMethod, Generators, replace_words
from posttrain.store.errors import UserError
from posttrain.store.hashing import file_digest
from posttrain.store.text_files import read_text

_WORD = re.compile(r"[^\W\d_]+(?:['’-][^\W\d_]+)*")

_KEYBOARD_ROWS = ("qwertyuiop", "asdfghjkl", "zxcvbnm")

# Not a word of an address, an amount or a code: a mistake there would change what the text means.
_TYPO_WORD = re.compile(r"(?<![\w@.£#-])[A-Za-z]{4,}(?![\w@-])")


class Typos(AugmentMethod):
    """Mistypes words as on a keyboard; words with digits, addresses and short words stay."""

    method: Literal["typos"] = "typos"
    words: int = Field(1, ge=1, description="Number of words to mistype, one after the other.")

    def texts(self, texts: list[str], labels: list[str | None], rngs: Generators, copy: int) -> list[str | None]:
        return [self._mistyped(text, rng) for text, rng in zip(texts, rngs, strict=True)]

    def _mistyped(self, text: str, rng: np.random.Generator) -> str:
        for _ in range(self.words):
            text = add_typo(text, rng, set())
        return text


def adjacent_keys(letter: str) -> str:
    """Returns the letters to the left and right of a letter on a QWERTY keyboard."""
    row = next(row for row in _KEYBOARD_ROWS if letter in row)
    at = row.index(letter)
    return row[max(at - 1, 0) : at] + row[at + 1 : at + 2]


def add_typo(text: str, rng: np.random.Generator, vocabulary: set[str]) -> str:
    """Mistypes one word of at least four letters, never into a word of ``vocabulary`` (case-folded).

    A text without such a word is returned unchanged.
    """
    matches = list(_TYPO_WORD.finditer(text))
    if not matches:
        return text
    while True:
        match = matches[rng.integers(len(matches))]
        wrong = _mistyped_word(match[0], rng)
        if wrong.casefold() not in vocabulary:
            return text[: match.start()] + wrong + text[match.end() :]


def _mistyped_word(word: str, rng: np.random.Generator) -> str:
    at = int(rng.integers(1, len(word) - 1))  # first and last letters are seldom mistyped
    kind = rng.integers(4)
    if kind == 0:
        keys = adjacent_keys(word[at].lower())
        return word[:at] + keys[rng.integers(len(keys))] + word[at + 1 :]
    if kind == 1:
        return word[:at] + word[at + 1 :]
    if kind == 2:
        return word[:at] + word[at] + word[at:]
    return word[:at] + word[at + 1] + word[at] + word[at + 2 :]


class Synonyms(AugmentMethod):
    """Replaces words by others of their line in a file."""

    method: Literal["synonyms"] = "synonyms"
    file: Path = Field(
        description="File of synonyms: words with the same meaning on one line, with commas between them."
    )
    rate: float = Field(0.1, gt=0, le=1, description="Share of words with synonyms to replace; at least one.")

    def located(self, root: Path) -> Self:
        return self.model_copy(update={"file": root / self.file.expanduser()})

    def check(self) -> None:
        read_synonyms(self.file)

    def key(self) -> dict[str, Any]:
        return {**self.model_dump(mode="json"), "file": file_digest(self.file)}

    def texts(self, texts: list[str], labels: list[str | None], rngs: Generators, copy: int) -> list[str | None]:
        return [self._replaced(text, rng) for text, rng in zip(texts, rngs, strict=True)]

    def _replaced(self, text: str, rng: np.random.Generator) -> str | None:
        synonyms_of = read_synonyms(self.file)
        candidates = [
            (match, synonyms) for match in _WORD.finditer(text) if (synonyms := synonyms_of.get(match[0].casefold()))
        ]
        if not candidates:
            return None
        indices = np.flatnonzero(rng.random(len(candidates)) < self.rate)
        if not indices.size:  # at a low rate most short texts would get no variant
            indices = rng.integers(len(candidates), size=1)
        matches, choices = zip(*(candidates[index] for index in indices.tolist()), strict=True)
        words = [synonyms[rng.integers(len(synonyms))] for synonyms in choices]
        return replace_words(
            text, matches, [_match_case(word, match[0]) for word, match in zip(words, matches, strict=True)]
        )


class Noise(AugmentMethod):
    """Replaces each word by a blank with the same probability."""

    method: Literal["noise"] = "noise"
    rate: float = Field(0.1, gt=0, lt=1, description="Probability that a word is replaced.")
    blank: str = Field("_", min_length=1, description="Text in place of a word.")

    def texts(self, texts: list[str], labels: list[str | None], rngs: Generators, copy: int) -> list[str | None]:
        return [self._noised(text, rng) for text, rng in zip(texts, rngs, strict=True)]

    def _noised(self, text: str, rng: np.random.Generator) -> str | None:
        matches = list(re.finditer(r"\S+", text))
        # One draw a word, whether or not it is replaced: a higher rate adds replacements and keeps the others.
        hits = [matches[at] for at in np.flatnonzero(rng.random(len(matches)) < self.rate).tolist()]
        return replace_words(text, hits, [self.blank] * len(hits)) if hits else None


@lru_cache(maxsize=4)
def read_synonyms(file: Path) -> Mapping[str, tuple[str, ...]]:
    """Reads the synonyms of each case-folded word, those on a line with it, sorted.

    Lines that are empty or begin with ``#`` are skipped; a word may be on several lines.

    Raises:
        UserError: the file cannot be read, a line holds a single word, or no line holds any.
    """
    synonyms: dict[str, set[str]] = {}
    for number, line in enumerate(read_text(file, str(file)).splitlines(), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        words = [word.strip() for word in line.split(",") if word.strip()]
        if len(words) < 2:
            fix = "put words that mean the same on one line, with commas between them"
            raise UserError("one word alone has no synonym", where=f"{file}:{number}", fix=fix)
        for word in words:
            # A word of several lines has the synonyms of all: the file does not say which sense is meant.
            synonyms.setdefault(word.casefold(), set()).update(words)
    if not synonyms:
        raise UserError("holds no synonyms", where=str(file), fix="write a line such as `buy, purchase`")
    return {
        word: tuple(sorted(other for other in others if other.casefold() != word)) for word, others in synonyms.items()
    }


def _match_case(word: str, before: str) -> str:
    """Gives a word the capitals of the word that it replaces."""
    if before.isupper() and len(before) > 1:
        return word.upper()
    return word[:1].upper() + word[1:] if before[:1].isupper() else word
