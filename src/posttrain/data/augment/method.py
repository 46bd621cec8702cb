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
    """A way to vary records. A method overrides `texts`.

    It gets a random generator for each record and copy, so that no variant depends on other records.
    """

    method: str
    copies: int = Field(1, ge=1, description="Variants per record.")
    share: float = Field(1.0, gt=0, le=1, description="Share of the records that each copy varies.")

    def located(self, root: Path) -> Self:
        """Returns the method with its paths resolved against ``root``."""
        return self

    def check(self) -> None:
        """Raises a UserError if a package or a file that the method needs is missing."""

    def key(self) -> dict[str, Any]:
        """Returns everything that variants depend on, as JSON; files by digest."""
        return self.model_dump(mode="json")

    def texts(self, texts: list[str], labels: list[str | None], rngs: Generators, copy: int) -> list[str | None]:
        """Returns a variant of each text; None where there is none.

        Args:
            labels: The answers, for methods that depend on them.
            rngs: A generator for each text.
            copy: The index of the copy, below ``copies``.
        """
        return [None] * len(texts)


def record_generator(seed: int, id: str, method: str, copy: int) -> np.random.Generator:
    """Returns a generator that depends on these values alone."""
    # Separated by NUL, which no part holds: otherwise different parts could join to equal text.
    digest = hashlib.sha256(f"{seed}\0{id}\0{method}\0{copy}".encode()).digest()
    return np.random.Generator(np.random.PCG64(int.from_bytes(digest[:16])))


def replace_words(text: str, matches: Sequence[re.Match[str]], replacements: Sequence[str]) -> str:
    """Replaces each match, in order and without overlaps, by a word."""
    parts, end = [], 0
    for match, word in zip(matches, replacements, strict=True):
        parts += [text[end : match.start()], word]
        end = match.end()
    return "".join([*parts, text[end:]])
