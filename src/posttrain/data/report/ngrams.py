"""Counts word n-grams in groups of texts, and finds those whose share changed.

A word is a run of characters between spaces, and each Chinese or Japanese character by itself. Scripts that write words
together without such characters, such as Thai, count as one word between spaces.
"""

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Counts = npt.NDArray[np.int64]

SURE = 3.29
"""Of the log-odds' z-score, as two-sided p < 0.001: thousands of runs are looked at."""

_LISTED = 25

_IDEOGRAPHS = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"

_SPACED_WORD = re.compile(rf"[{_IDEOGRAPHS}]|[^\s{_IDEOGRAPHS}]+")

_WORD = re.compile(rf"[{_IDEOGRAPHS}]|[^\W{_IDEOGRAPHS}]+(?:['’][^\W{_IDEOGRAPHS}]+)*")


@dataclass(frozen=True)
class Ngrams:
    """Counts the runs of ``n`` words.

    Attributes:
        counts: int64 [G, K], for each group of texts how often each run occurs.
        places: int64 [K], where each run occurs first.
        word_numbers: int64 [W], the words of all texts, concatenated.
        vocabulary: the words by their numbers.
    """

    n: int
    counts: Counts
    places: Counts
    word_numbers: Counts
    vocabulary: Sequence[str]

    def text(self, run: int) -> str:
        """The words of the run with that number, separated by spaces."""
        start = int(self.places[run])
        return " ".join(self.vocabulary[word] for word in self.word_numbers[start : start + self.n].tolist())

    def most_common(self, count: int, group: int = 0) -> list[tuple[str, int]]:
        """The ``count`` most common runs of a group and their counts; of equal ones the first to occur."""
        counts = self.counts[group]
        runs = np.flatnonzero(counts)
        if len(runs) > count:  # sorting millions of rare runs would take long
            least = np.partition(counts[runs], -count)[-count]
            more, equal = runs[counts[runs] > least], runs[counts[runs] == least]
            runs = np.concatenate([more, equal[np.argsort(self.places[equal])[: count - len(more)]]])
        order = np.lexsort((self.places[runs], -counts[runs]))
        return [(self.text(run), int(counts[run])) for run in runs[order].tolist()]


def ngram_counts(groups: Sequence[Sequence[str]], longest: int) -> list[Ngrams]:
    """Counts the runs of 1 to ``longest`` words in each group of texts; no run spans two texts."""
    vocabulary: dict[str, int] = {}
    numbers: list[int] = []
    texts: list[int] = []
    sizes: list[int] = []
    for group in groups:
        for text in group:
            text_words = display_words(text)
            numbers += [vocabulary.setdefault(word, len(vocabulary)) for word in text_words]
            texts.append(len(text_words))
        sizes.append(len(numbers))
    word_numbers = np.array(numbers, dtype=np.int64)
    owner = np.repeat(np.arange(len(texts)), texts)
    bounds = np.array(sizes)
    runs, starts = word_numbers, np.arange(len(word_numbers))
    result = []
    for n in range(1, longest + 1):
        if n > 1:  # a run of n words is a run of n - 1, by its number, and a word more
            longer = starts[starts + n - 1 < len(word_numbers)]
            longer = longer[owner[longer] == owner[longer + n - 1]]
            runs = runs[np.searchsorted(starts, longer)] * len(vocabulary) + word_numbers[longer + n - 1]
            starts = longer
        _, first, runs = np.unique(runs, return_index=True, return_inverse=True)
        group_of = np.searchsorted(bounds, starts, side="right")
        counts = np.zeros((len(groups), len(first)), dtype=np.int64)
        for group_index in range(len(groups)):
            counts[group_index] = np.bincount(runs[group_of == group_index], minlength=len(first))
        result.append(Ngrams(n, counts, starts[first], word_numbers, list(vocabulary)))
    return result


@dataclass(frozen=True)
class NgramChange:
    """Compares a run of words in the older and the newer texts.

    Attributes:
        ratio: its share of all runs as long, newer over older; None where the older texts have none of it.
        log_odds: the natural logarithm of the ratio of its odds, drawn to 0 by the prior.
        z: ``log_odds`` in standard deviations.
    """

    ngram: str
    old: int
    new: int
    ratio: float | None
    log_odds: float
    z: float


@dataclass(frozen=True)
class NgramChanges:
    """The surest changes, at most 25 of each kind, the surest first."""

    appeared: tuple[NgramChange, ...]
    vanished: tuple[NgramChange, ...]
    more: tuple[NgramChange, ...]
    less: tuple[NgramChange, ...]

    def to_json(self) -> dict[str, Any]:
        kinds = {"new": self.appeared, "vanished": self.vanished, "more_common": self.more, "less_common": self.less}
        return {kind: [asdict(change) for change in changes] for kind, changes in kinds.items()}


def log_odds(
    old: npt.ArrayLike, new: npt.ArrayLike, prior: npt.ArrayLike
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Log-odds-ratio of each run, with an informative Dirichlet prior, and its z-score.

    Equations 16, 20 and 22 of Monroe, Colaresi and Quinn, "Fightin' Words", Political Analysis 2008.

    Args:
        old, new: counts [K].
        prior: pseudo-counts [K], all above zero.

    Returns:
        float64 [K] each; above zero for what is more common in ``new``.
    """
    weights = np.asarray(prior, dtype=np.float64)
    after, before = (np.asarray(counts, dtype=np.float64) + weights for counts in (new, old))
    # Equation 16: the odds of a run against all others, with pseudo-counts; equations 20 and 22 below.
    delta = np.log(after / (after.sum() - after)) - np.log(before / (before.sum() - before))
    return delta, delta / np.sqrt(1 / after + 1 / before)


def ngram_changes(counted: Sequence[Ngrams]) -> NgramChanges:
    """Finds the changes between the first and the second group of texts, of runs of all lengths together.

    The prior of each length is the counts of both groups, made as heavy as the smaller group's: what both say
    is not held for a change.
    """
    changes: list[NgramChange] = []
    for ngrams in counted:
        old, new = ngrams.counts
        sizes = old.sum(), new.sum()
        # Log-odds need a second n-gram to compare with, and a group with n-grams.
        if len(old) < 2 or not min(sizes):
            continue
        # The prior weighs as much as the smaller group, so a difference in size alone is not a change.
        delta, z = log_odds(old, new, (old + new) * (min(sizes) / sum(sizes)))
        for run in np.flatnonzero(np.abs(z) >= SURE).tolist():
            ratio = float(new[run] / sizes[1] / (old[run] / sizes[0])) if old[run] else None
            changes.append(
                NgramChange(ngrams.text(run), int(old[run]), int(new[run]), ratio, float(delta[run]), float(z[run]))
            )
    changes.sort(key=lambda change: (-abs(change.z), change.ngram))
    return NgramChanges(
        appeared=tuple([ngrams for ngrams in changes if ngrams.old == 0][:_LISTED]),
        vanished=tuple([ngrams for ngrams in changes if ngrams.new == 0][:_LISTED]),
        more=tuple([ngrams for ngrams in changes if ngrams.z > 0 and ngrams.old][:_LISTED]),
        less=tuple([ngrams for ngrams in changes if ngrams.z < 0 and ngrams.new][:_LISTED]),
    )


def word_count(text: str) -> int:
    """Counts the words; punctuation belongs to the word that it touches."""
    # ASCII has no ideographs, and `split` is much faster than the expression.
    return len(text.split()) if text.isascii() else len(_SPACED_WORD.findall(text))


def display_words(text: str) -> list[str]:
    """The words case-folded and without punctuation, but with apostrophes: people read them in n-grams."""
    return _WORD.findall(text.casefold())
