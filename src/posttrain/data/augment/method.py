"""The base class of augmentation methods, and what several of them use."""

import hashlib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
from pydantic import Field

from posttrain.store.section import Section

Generators = Sequence[np.random.Generator]


class AugmentMethod(Section):
    """How records are varied. A method changes what a record says (`text`) or what its ``meta`` names (`meta`).

    Both get a generator of their own for each record and copy, so that nothing depends on other records.
    """

    method: str
    copies: int = Field(1, ge=1, description="New records of each one that is varied.")
    share: float = Field(1.0, gt=0, le=1, description="Share of the records that a copy is made of.")

    def located(self, root: Path) -> Self:
        """The method with its files named from ``root``."""
        return self

    def check(self) -> None:
        """Raise a UserError if a package or a file that the method needs is missing."""

    def key(self) -> dict[str, Any]:
        """What the outcome depends on, as JSON values: of a file the digest."""
        return self.model_dump(mode="json")

    def texts(self, texts: list[str], labels: list[str | None], rngs: Generators, copy: int) -> list[str | None]:
        """A variant of each text; None where there is none.

        Args:
            labels: the answers, for methods that go by them.
            rngs: one a text.
            copy: which of ``copies`` is made, from 0 on.
        """
        return [None] * len(texts)

    def meta(self, meta: dict[str, Any], source: str, rng: np.random.Generator) -> dict[str, Any] | None:
        """A variant of a record's ``meta``; None where there is none.

        Args:
            source: the file that the record is from; what ``meta`` names lies beside it.
        """
        return None


def record_generator(seed: int, id: str, method: str, copy: int) -> np.random.Generator:
    """A generator that these alone decide."""
    digest = hashlib.sha256(f"{seed}\0{id}\0{method}\0{copy}".encode()).digest()
    return np.random.Generator(np.random.PCG64(int.from_bytes(digest[:16])))


def replace_words(text: str, matches: Sequence[re.Match[str]], replacements: Sequence[str]) -> str:
    """``text`` with each of the words in the place of one match; the matches are in order and apart."""
    parts, end = [], 0
    for match, word in zip(matches, replacements, strict=True):
        parts += [text[end : match.start()], word]
        end = match.end()
    return "".join([*parts, text[end:]])
