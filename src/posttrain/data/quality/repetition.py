"""Measures repetition within texts: of lines, paragraphs and n-grams of words."""

from collections.abc import Iterable, Sequence
from itertools import count
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Shares = npt.NDArray[np.float64]
Indices = npt.NDArray[np.int64]

_WORDS_A_BLOCK = 1 << 16


def repeated_shares(parts: Sequence[str]) -> tuple[float, float]:
    """Returns the share of parts that repeat an earlier part, and the share of characters in them.

    Both are NaN without parts or characters.
    """
    distinct = dict.fromkeys(parts)
    if len(distinct) == len(parts):
        return (0.0, 0.0) if any(parts) else (float("nan"), float("nan"))
    total = sum(map(len, parts))
    characters = (total - sum(map(len, distinct))) / total if total else float("nan")
    return (len(parts) - len(distinct)) / len(parts), characters


class NgramShares(NamedTuple):
    """Shares of the characters of N texts, by the n of the n-gram, float64 [N] each; NaN for a text without words.

    Attributes:
        top: those in the occurrences of the n-gram of words that occurs most often, of several the one with the most
            characters; 0 where none occurs twice, and never above 1, where occurrences overlap.
        repeated: those of the words that lie in an n-gram that stood before, each counted once.
    """

    top: dict[int, Shares]
    repeated: dict[int, Shares]


def ngram_shares(texts: Sequence[str], top: Iterable[int], repeated: Iterable[int]) -> NgramShares:
    """Computes shares of repeated n-grams of words, split at whitespace, which does not count as characters."""
    tops, repeats = set(top), set(repeated)
    shares = NgramShares(
        {n: np.full(len(texts), np.nan) for n in tops}, {n: np.full(len(texts), np.nan) for n in repeats}
    )
    for begin, end, block in _blocks(texts):
        for n, starts, names in block.recurring(max(tops | repeats, default=0)):
            if n in tops:
                shares.top[n][begin:end] = block.top(n, starts, names)
            if n in repeats:
                shares.repeated[n][begin:end] = block.repeated(n, starts, names)
    return shares


class _Block(NamedTuple):
    """The W words of consecutive texts.

    Attributes:
        words: int64 [W], an index for each distinct word of each text.
        text: int64 [W], the text of every word.
        behind: int64 [W], the number of words from that word to the end of its text.
        before: int64 [W + 1], characters before every word.
        characters: float64, of each text.
    """

    words: Indices
    text: Indices
    behind: Indices
    before: Indices
    characters: Shares

    def recurring(self, longest: int) -> Iterable[tuple[int, Indices, Indices]]:
        """Yields n, the starts of the n-grams that occur at least twice, and an index of each, for n up to longest."""
        # An n-gram that occurs twice holds an (n - 1)-gram that does, so each n only needs the survivors of n - 1.
        starts, names = np.arange(len(self.words)), self.words
        size = int(self.words.max(initial=0)) + 1
        for n in range(1, longest + 1):
            if n > 1:
                fits = self.behind[starts] >= n
                starts = starts[fits]
                names = names[fits] * size + self.words[starts + n - 1]
            _, names, counts = np.unique(names, return_inverse=True, return_counts=True)
            twice = counts[names] > 1
            starts, names = starts[twice], names[twice]
            yield n, starts, names

    def top(self, n: int, starts: Indices, names: Indices) -> Shares:
        most, best = np.zeros(len(self.characters)), np.zeros(len(self.characters))
        _, first, counts = np.unique(names, return_index=True, return_counts=True)
        text = self.text[starts[first]]
        np.maximum.at(most, text, counts)
        within = counts * (self.before[starts[first] + n] - self.before[starts[first]])
        leads = counts == most[text]
        np.maximum.at(best, text[leads], within[leads])
        return np.minimum(_divide(best, self.characters), 1)

    def repeated(self, n: int, starts: Indices, names: Indices) -> Shares:
        again = np.ones(len(starts), dtype=bool)
        again[np.unique(names, return_index=True)[1]] = False
        # Counts of open n-grams by a difference array: overlapping ones cover a word once.
        borders = np.zeros(len(self.words) + 1, dtype=np.int64)
        borders[starts[again]] += 1
        borders[starts[again] + n] -= 1
        return _divide(self._covered(borders), self.characters)

    def _covered(self, borders: Indices) -> Shares:
        inside = np.cumsum(borders[:-1]) > 0
        lengths = np.diff(self.before)[inside]
        return _total(self.text[inside], lengths, len(self.characters))


def _blocks(texts: Sequence[str]) -> Iterable[tuple[int, int, _Block]]:
    """Yields begin, end and words of blocks of texts that fit into a processor's cache."""
    begin, split, words = 0, [], 0
    for row, text in enumerate(texts):
        split.append(text.split())
        words += len(split[-1])
        if words >= _WORDS_A_BLOCK or row + 1 == len(texts):
            yield begin, row + 1, _block(split)
            begin, split, words = row + 1, [], 0


def _block(split: Sequence[Sequence[str]]) -> _Block:
    numbers = count()
    names: list[int] = []
    for words in split:
        # A new dictionary for each text, with numbers that continue: equal words of two texts must not recur.
        ids: dict[str, int] = {}
        names += [ids.setdefault(word, number) for word, number in zip(words, numbers, strict=False)]
    sizes = np.fromiter(map(len, split), np.int64, len(split))
    text = np.repeat(np.arange(len(split)), sizes)
    lengths = np.fromiter((len(word) for words in split for word in words), np.int64, len(names))
    before = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
    ends = np.cumsum(sizes)
    characters = _total(text, lengths, len(split))
    return _Block(np.array(names, np.int64), text, np.repeat(ends, sizes) - np.arange(len(names)), before, characters)


def _total(text: Indices, lengths: Indices, texts: int) -> Shares:
    return np.bincount(text, weights=lengths, minlength=texts).astype(np.float64)


def _divide(part: Shares, whole: Shares) -> Shares:
    quotients = np.full(len(whole), np.nan)
    np.divide(part, whole, out=quotients, where=whole > 0)
    return quotients
