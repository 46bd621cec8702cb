"""Noising as smoothing (Xie et al. 2017, "Data Noising as Smoothing in Neural Network Language Models", 1703.02573)."""

import itertools
import json
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
import numpy.typing as npt
from pydantic import Field, model_validator

from posttrain.data.augment.method import AugmentMethod, Generators, replace_words
from posttrain.store.errors import UserError
from posttrain.store.files import write_atomically
from posttrain.store.hashing import file_digest
from posttrain.store.text_files import read_text

# Split as `count_words` splits, or the counts would be of other words.
_WORD = re.compile(r"\S+")


class Noise(AugmentMethod):
    """Replaces words by a blank, or by words drawn from the corpus' counts, each with its own probability.

    The probabilities of section 3.3, where x is the word and ``rate`` is gamma 0:

    - ``blank``: ``rate`` for every word, which stands for interpolation with a uniform blank.
    - ``unigram``: ``rate`` for every word, another drawn by c(x): linear interpolation with the unigram.
    - ``back_off``: ``rate N1+(x, .) / c(x, .)``, as absolute discounting backs off where many words follow; another
      drawn by N1+(., x), as Kneser-Ney's lower order is: words that come after many others are likelier to come here.
    """

    method: Literal["noise"] = "noise"
    kind: Literal["blank", "unigram", "back_off"] = Field(
        "blank", description="Replacement of words, and with it their probabilities."
    )
    rate: float = Field(0.1, gt=0, lt=1, description="Gamma 0: the probability that a word is replaced.")
    blank: str = Field("_", min_length=1, description="Text that `blank` writes in place of a word.")
    counts: Path | None = Field(None, description="For unigram and back_off: a file written by write_counts.")

    @model_validator(mode="after")
    def _counts_are_there(self) -> Self:
        if (self.kind == "blank") != (self.counts is None):
            raise ValueError("unigram and back_off need `counts`, blank has none")
        return self

    def located(self, root: Path) -> Self:
        return self.model_copy(update={"counts": root / self.counts.expanduser()}) if self.counts else self

    def check(self) -> None:
        if self.counts is not None:
            read_counts(self.counts)

    def key(self) -> dict[str, Any]:
        return {**self.model_dump(mode="json"), "counts": file_digest(self.counts) if self.counts else None}

    def texts(self, texts: list[str], labels: list[str | None], rngs: Generators, copy: int) -> list[str | None]:
        return [self._noised(text, rng) for text, rng in zip(texts, rngs, strict=True)]

    def probability(self, words: list[str]) -> npt.NDArray[np.float64]:
        """Returns gamma of each word, float64 [N]; ``rate`` for a word without counts, or that nothing follows."""
        gamma = np.full(len(words), self.rate)
        if self.kind == "back_off" and self.counts is not None:
            row_of_word = _word_index(self.counts)
            rows = np.array([row_of_word.get(word, -1) for word in words], dtype=np.int64)
            counts, is_counted = read_counts(self.counts), rows >= 0
            followed = counts.followed[rows[is_counted]]
            # Gamma of absolute discounting, N1+(x, .) / c(x, .) times gamma 0 (section 3.3 of the paper).
            share = counts.followers[rows[is_counted]] / np.maximum(followed, 1)
            gamma[is_counted] = self.rate * np.where(followed > 0, share, 1.0)
        return gamma

    def _noised(self, text: str, rng: np.random.Generator) -> str | None:
        matches = list(_WORD.finditer(text))
        # One draw a word, whether or not it is replaced: a higher rate adds replacements and keeps the others.
        hits = np.flatnonzero(rng.random(len(matches)) < self.probability([match[0] for match in matches]))
        if not hits.size:
            return None
        if self.counts is None:
            new = [self.blank] * hits.size
        else:
            counts = read_counts(self.counts)
            # The cumulated distribution, inverted: a search a word, where `choice` would read the whole vocabulary.
            rows = np.searchsorted(_cumulative(self.counts, self.kind), rng.random(hits.size), side="right")
            new = [counts.words[row] for row in rows.tolist()]
        return replace_words(text, [matches[at] for at in hits.tolist()], new)


@dataclass(frozen=True)
class NoiseCounts:
    """Counts of the V words of a corpus, split at whitespace and case-sensitive.

    Attributes:
        words: Sorted, [V].
        counts: Occurrences c(x), int64 [V].
        followed: Occurrences with a word behind them, c(x, .), int64 [V].
        followers: Different words that follow x, N1+(x, .), int64 [V].
        predecessors: Different words that come before x, N1+(., x), int64 [V].
    """

    words: tuple[str, ...]
    counts: npt.NDArray[np.int64]
    followed: npt.NDArray[np.int64]
    followers: npt.NDArray[np.int64]
    predecessors: npt.NDArray[np.int64]


def replacement_distribution(counts: NoiseCounts, kind: str) -> npt.NDArray[np.float64]:
    """Returns the distribution from which replacements are drawn, float64 [V]."""
    # Kneser-Ney's lower order; a corpus of single words has no predecessors, and falls back on the unigram.
    weights = counts.predecessors if kind == "back_off" and counts.predecessors.any() else counts.counts
    return np.asarray(weights / weights.sum(), dtype=np.float64)


@lru_cache(maxsize=4)
def _cumulative(file: Path, kind: str) -> npt.NDArray[np.float64]:
    cumulated = np.cumsum(replacement_distribution(read_counts(file), kind))
    cumulated[-1] = 1.0  # rounding may leave it below 1, and a draw above it would have no word
    return np.asarray(cumulated, dtype=np.float64)


@lru_cache(maxsize=2)
def _word_index(file: Path) -> dict[str, int]:
    return {word: row for row, word in enumerate(read_counts(file).words)}


def count_words(texts: Iterable[str]) -> NoiseCounts:
    """Counts words and bigrams; no bigram spans two texts."""
    counts: Counter[str] = Counter()
    followed: Counter[str] = Counter()
    pairs: set[tuple[str, str]] = set()
    for text in texts:
        tokens = text.split()
        counts.update(tokens)
        followed.update(tokens[:-1])
        pairs.update(itertools.pairwise(tokens))
    followers, predecessors = Counter(first for first, _ in pairs), Counter(second for _, second in pairs)
    words = tuple(sorted(counts))
    columns = (
        np.array([count[word] for word in words], dtype=np.int64)
        for count in (counts, followed, followers, predecessors)
    )
    return NoiseCounts(words, *columns)


def write_counts(counts: NoiseCounts, file: Path) -> None:
    """Writes counts as JSON: ``{"words": [[word, count, followed, followers, predecessors], ...]}``.

    Raises:
        UserError: the disk refused.
    """
    columns = (
        counts.counts.tolist(),
        counts.followed.tolist(),
        counts.followers.tolist(),
        counts.predecessors.tolist(),
    )
    rows = list(zip(counts.words, *columns, strict=True))
    write_atomically(file, json.dumps({"words": rows}, ensure_ascii=False).encode())


@lru_cache(maxsize=2)
def read_counts(file: Path) -> NoiseCounts:
    """Reads the counts that `write_counts` wrote.

    Raises:
        UserError: the file cannot be read or holds something else.
    """
    try:
        rows = json.loads(read_text(file, str(file)))["words"]
        words = tuple(str(row[0]) for row in rows)
        numbers = np.array([row[1:] for row in rows], dtype=np.int64).reshape(len(rows), 4)
    except (ValueError, LookupError, TypeError, RecursionError):
        raise UserError(
            "holds no counts", where=str(file), fix="write it with write_counts(count_words(texts))"
        ) from None
    if not words or numbers.min() < 0 or numbers[:, 0].min() < 1:
        raise _no_counts_error(file)
    return NoiseCounts(words, *numbers.T)


def _no_counts_error(file: Path) -> UserError:
    return UserError("holds no counts", where=str(file), fix="write it with write_counts(count_words(texts))")
