"""ROUGE-L (Lin 2004, W04-1013) of a text to all earlier ones."""

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


def longest_common_subsequence(one: Sequence[str], other: Sequence[str]) -> int:
    """Length of the longest sequence that both hold in order, bit-parallel (Hyyrö 2004, "Bit-parallel LCS-length")."""
    places: dict[str, int] = {}
    for place, word in enumerate(one):
        places[word] = places.get(word, 0) | 1 << place
    full = (1 << len(one)) - 1
    row = full
    for word in other:
        hits = row & places.get(word, 0)
        row = ((row + hits) | (row - hits)) & full
    return len(one) - row.bit_count()


class RougeIndex:
    """Earlier texts, and which of them a new one is most like by ROUGE-L's F1.

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
        """Have later texts compared to this one too."""
        found = rouge_words(text)
        for word, count in Counter(found).items():
            rows, counts = self._holders.setdefault(word, (array("i"), array("i")))
            rows.append(len(self._texts))
            counts.append(count)
        self._texts.append(found)
        self._lengths.append(len(found))

    def of(self, text: str, least: float) -> tuple[float, int] | None:
        """F1 and index of the most similar earlier text, the first of equals; None if none reaches ``least`` > 0."""
        found = rouge_words(text)
        if not found or not self._texts:
            return None
        shared = np.zeros(len(self._texts), dtype=np.int64)
        for word, count in Counter(found).items():
            if word in self._holders:
                rows, counts = (np.array(values, dtype=np.int64) for values in self._holders[word])
                shared[rows] += np.minimum(counts, count)
        bounds = 2.0 * shared / (np.array(self._lengths, dtype=np.int64) + len(found))
        chances = np.flatnonzero(bounds >= least)
        best: tuple[float, int] | None = None
        for row in chances[np.argsort(-bounds[chances], kind="stable")].tolist():
            if best is not None and bounds[row] < best[0]:
                break
            common = longest_common_subsequence(self._texts[row], found)
            score = 2.0 * common / (len(self._texts[row]) + len(found))
            if score >= least and (best is None or (score, -row) > (best[0], -best[1])):
                best = score, row
        return best
