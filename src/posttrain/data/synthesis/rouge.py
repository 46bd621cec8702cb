"""Compares a text with all earlier ones by ROUGE-L (Lin 2004, W04-1013)."""

import re
from array import array
from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np

# Runs of letters and digits; where words have no spaces between them, each character.
_WORD = re.compile(r"[぀-ヿ㐀-䶿一-鿿豈-﫿]|[^\W_぀-ヿ㐀-䶿一-鿿豈-﫿]+")


def rouge_words(text: str) -> list[str]:
    """The case-folded words that are compared."""
    return _WORD.findall(text.casefold())


def longest_common_subsequence(first: Sequence[str], other: Sequence[str]) -> int:
    """Length of the longest sequence that both hold in order, bit-parallel (Hyyrö 2004, "Bit-parallel LCS-length")."""
    positions: dict[str, int] = {}
    for index, word in enumerate(first):
        positions[word] = positions.get(word, 0) | 1 << index
    full = (1 << len(first)) - 1
    row = full
    for word in other:
        hits = row & positions.get(word, 0)
        # Addition carries through runs of matches: one big-integer step updates a whole row of the dynamic programme.
        row = ((row + hits) | (row - hits)) & full
    return len(first) - row.bit_count()


class RougeIndex:
    """Indexes texts, and finds the one most similar to a new text by ROUGE-L's F1.

    F1 is ``2 LCS / (m + n)`` for texts of m and n words. Words shared in any order bound the LCS from above, so that
    it is computed only where that bound leaves a chance.
    """

    def __init__(self, texts: Iterable[str] = ()) -> None:
        self._texts: list[list[str]] = []
        self._lengths = array("i")
        self._holders: dict[str, tuple[array[int], array[int]]] = {}
        for text in texts:
            self.add(text)

    def add(self, text: str) -> None:
        """Adds a text to the index."""
        text_words = rouge_words(text)
        for word, count in Counter(text_words).items():
            rows, counts = self._holders.setdefault(word, (array("i"), array("i")))
            rows.append(len(self._texts))
            counts.append(count)
        self._texts.append(text_words)
        self._lengths.append(len(text_words))

    def of(self, text: str, least: float) -> tuple[float, int] | None:
        """F1 and index of the most similar earlier text, the first of equals; None if none reaches ``least`` > 0."""
        text_words = rouge_words(text)
        if not text_words or not self._texts:
            return None
        shared = np.zeros(len(self._texts), dtype=np.int64)
        for word, count in Counter(text_words).items():
            if word in self._holders:
                rows, counts = (np.array(values, dtype=np.int64) for values in self._holders[word])
                # Words in common, in any order, bound the subsequence from above; most texts are ruled out without
                # computing it.
                shared[rows] += np.minimum(counts, count)
        bounds = 2.0 * shared / (np.array(self._lengths, dtype=np.int64) + len(text_words))
        chances = np.flatnonzero(bounds >= least)
        best: tuple[float, int] | None = None
        for row in chances[np.argsort(-bounds[chances], kind="stable")].tolist():
            # Bounds fall, so no later text can beat the best one.
            if best is not None and bounds[row] < best[0]:
                break
            common = longest_common_subsequence(self._texts[row], text_words)
            score = 2.0 * common / (len(self._texts[row]) + len(text_words))
            if score >= least and (best is None or (score, -row) > (best[0], -best[1])):
                best = score, row
        return best
