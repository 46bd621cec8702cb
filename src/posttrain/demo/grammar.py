"""Phrases with alternatives: ``[a|b|]`` chooses one, ``{name}`` is a slot, anything else is itself."""

import math
import re
from dataclasses import dataclass

import numpy as np

_TOKEN = re.compile(r"[\[\]|]|[^\[\]|]+")


@dataclass(frozen=True)
class Phrase:
    """One alternative: text and choices, one after another."""

    parts: tuple["str | Choice", ...]

    def expand(self, rng: np.random.Generator) -> str:
        """One of the phrase's texts; each choice is uniform. Slots stay as they are."""
        return "".join(part if isinstance(part, str) else part.expand(rng) for part in self.parts)

    def count(self) -> int:
        """How many ways there are to expand the phrase, slots left alone."""
        return math.prod(1 if isinstance(part, str) else part.count() for part in self.parts)

    def texts(self) -> list[str]:
        """Every literal piece of text in the phrase, slots included."""
        pieces = []
        for part in self.parts:
            pieces += [part] if isinstance(part, str) else [t for o in part.options for t in o.texts()]
        return pieces


@dataclass(frozen=True)
class Choice:
    """Alternatives, one of which is taken."""

    options: tuple[Phrase, ...]

    def expand(self, rng: np.random.Generator) -> str:
        return self.options[rng.integers(len(self.options))].expand(rng)

    def count(self) -> int:
        return sum(option.count() for option in self.options)


def parse(line: str) -> Phrase:
    """Read one phrase.

    Raises:
        ValueError: a bracket that is not closed, or a ``|`` or ``]`` outside brackets.
    """
    tokens = _TOKEN.findall(line)
    phrase, used = _phrase(tokens, 0)
    if used < len(tokens):
        raise ValueError(f"`{tokens[used]}` outside brackets in: {line}")
    return phrase


def _phrase(tokens: list[str], at: int) -> tuple[Phrase, int]:
    parts: list[str | Choice] = []
    while at < len(tokens) and tokens[at] not in "|]":
        if tokens[at] == "[":
            choice, at = _choice(tokens, at + 1)
            parts.append(choice)
        else:
            parts.append(tokens[at])
            at += 1
    return Phrase(tuple(parts)), at


def _choice(tokens: list[str], at: int) -> tuple[Choice, int]:
    options = []
    while True:
        option, at = _phrase(tokens, at)
        options.append(option)
        if at == len(tokens):
            raise ValueError(f"a bracket is not closed in: {''.join(tokens)}")
        at += 1
        if tokens[at - 1] == "]":
            return Choice(tuple(options)), at
