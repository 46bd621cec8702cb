"""How often runs of words occur in some groups of texts."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from posttrain.data.quality_report.words import shown_words

Counts = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Ngrams:
    """Counts of the runs of ``n`` words.

    Attributes:
        counts: int64 [G, K], for each group of texts how often each run occurs.
        places: int64 [K], where each run occurs first.
        words: int64 [W], the words of all texts, one behind the other.
        vocabulary: the words by their numbers.
    """

    n: int
    counts: Counts
    places: Counts
    words: Counts
    vocabulary: Sequence[str]

    def text(self, run: int) -> str:
        """The words of the run with that number, with spaces between."""
        start = int(self.places[run])
        return " ".join(self.vocabulary[word] for word in self.words[start : start + self.n].tolist())

    def most_common(self, count: int, group: int = 0) -> list[tuple[str, int]]:
        """The ``count`` most common runs of a group and how often they occur; of equal ones the first to occur."""
        counts = self.counts[group]
        found = np.flatnonzero(counts)
        if len(found) > count:  # sorting millions of rare runs would take long
            least = np.partition(counts[found], -count)[-count]
            more, equal = found[counts[found] > least], found[counts[found] == least]
            found = np.concatenate([more, equal[np.argsort(self.places[equal])[: count - len(more)]]])
        order = np.lexsort((self.places[found], -counts[found]))
        return [(self.text(run), int(counts[run])) for run in found[order].tolist()]


def ngram_counts(groups: Sequence[Sequence[str]], longest: int) -> list[Ngrams]:
    """The runs of 1 to ``longest`` words in each group of texts; no run goes from one text to the next."""
    vocabulary: dict[str, int] = {}
    numbers: list[int] = []
    texts: list[int] = []
    sizes: list[int] = []
    for group in groups:
        for text in group:
            found = shown_words(text)
            numbers += [vocabulary.setdefault(word, len(vocabulary)) for word in found]
            texts.append(len(found))
        sizes.append(len(numbers))
    words = np.array(numbers, dtype=np.int64)
    owner = np.repeat(np.arange(len(texts)), texts)
    bounds = np.array(sizes)
    runs, starts = words, np.arange(len(words))
    result = []
    for n in range(1, longest + 1):
        if n > 1:  # a run of n words is a run of n - 1, by its number, and a word more
            longer = starts[starts + n - 1 < len(words)]
            longer = longer[owner[longer] == owner[longer + n - 1]]
            runs = runs[np.searchsorted(starts, longer)] * len(vocabulary) + words[longer + n - 1]
            starts = longer
        _, first, runs = np.unique(runs, return_index=True, return_inverse=True)
        group_of = np.searchsorted(bounds, starts, side="right")
        counts = np.zeros((len(groups), len(first)), dtype=np.int64)
        for at in range(len(groups)):
            counts[at] = np.bincount(runs[group_of == at], minlength=len(first))
        result.append(Ngrams(n, counts, starts[first], words, list(vocabulary)))
    return result
