"""Runs of words that training and evaluation records share."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from posttrain.data.contamination.postings import Postings, set_of
from posttrain.data.contamination.winnowing import fingerprints, minima
from posttrain.data.duplicates.shingles import Hashes, Indices, Shingles, distinct, hashes, members, runs
from posttrain.data.records.normalise import input_texts, texts_of
from posttrain.data.records.words import plain_words

_SHORT_INPUT = 1024  # characters from which an input is not asked whether it has few words


class Overlap(NamedTuple):
    """What a training record shares with one evaluation record.

    Attributes:
        other: the evaluation record's row.
        shared: distinct n-grams that both have.
        own: those of the training record.
        others: those of the evaluation record.
        whole: whether both are shorter than an n-gram, and the same.
    """

    other: int
    shared: int
    own: int
    others: int
    whole: bool = False

    @property
    def score(self) -> float:
        """The larger of the two shares."""
        return max(self.shared / self.own, self.shared / self.others)


@dataclass(frozen=True)
class WordIndex:
    """The word n-grams of T evaluation records, prompt and answers in one.

    Attributes:
        ngram: words in a run.
        share: least part of either record's n-grams that must be shared; at 0 one n-gram is enough.
        sizes: int64 [T], n-grams of every evaluation record.
        postings: the n-grams; owner: the evaluation record.
        short: inputs of fewer than ``ngram`` words, whole; owner: the evaluation record.
        marks: the first 32 bits of the fingerprints of all of these (`posttrain.data.contamination.winnowing`);
        owner: the evaluation
            record.
    """

    ngram: int
    share: float
    sizes: Indices
    postings: Postings
    short: Postings
    marks: Postings

    @classmethod
    def of(cls, evaluation: pa.Table, ngram: int, share: float, ignore_above: int | None) -> Self:
        """Index a RECORD table; n-grams in more than ``ignore_above`` different records of it are left out."""
        rows = np.arange(evaluation.num_rows)
        words = plain_words(texts_of(evaluation))
        sets = hashes(words, ngram, "word")
        common = np.concatenate([hashes([""], ngram, "word").values, _common(sets, evaluation, ignore_above)])
        sets = _without(sets, common)
        few, short = few_words(input_texts(evaluation), ngram)
        least, told = minima(words, ngram), ~np.isin(runs(words, ngram, "word").values, common)
        marks = np.concatenate([least.values[told], fingerprints(few, ngram).values])
        owners = np.concatenate([np.repeat(rows, least.sizes)[told], short])
        return cls(
            ngram,
            share,
            sets.sizes,
            Postings.of(sets, rows),
            Postings.of(hashes(few, ngram, "word"), short),
            Postings.of(Shingles(narrow(marks), np.arange(len(marks) + 1)), owners),
        )

    def search(self, inputs: Sequence[str], texts: Sequence[str], pairs: list[tuple[int, int]]) -> dict[int, Overlap]:
        """By row of N training records the evaluation record that shares most n-grams, of equals the first.

        Args:
            inputs: of every record.
            texts: all of every record.
            pairs: every training and evaluation record that are found are noted there.
        """
        best: dict[int, Overlap] = {}
        sets = runs(plain_words(texts), self.ngram, "word")
        at, keys = self.postings.find(sets.values)
        rows = set_of(sets, at)
        touched = np.unique(rows)
        sizes = np.zeros(len(texts), dtype=np.int64)
        sizes[touched] = distinct(members(sets, touched)).sizes
        for meetings in self.postings.meet(rows, keys):
            for row, other, shared in zip(*(values.tolist() for values in meetings), strict=True):
                overlap = Overlap(other, shared, int(sizes[row]), int(self.sizes[other]))
                if overlap.score < self.share:
                    continue
                pairs.append((row, other))
                if row not in best or (-shared, other) < (-best[row].shared, best[row].other):
                    best[row] = overlap
        few, short = few_words(inputs, self.ngram)
        at, keys = self.short.find(runs(few, self.ngram, "word").values)
        for row, key in zip(short[at].tolist(), keys.tolist(), strict=True):
            others = self.short.owners[self.short.offsets[key] : self.short.offsets[key + 1]].tolist()
            pairs += ((row, other) for other in others)
            best[row] = Overlap(others[0], 1, 1, 1, whole=True)
        return best


def now_common(evaluation: pa.Table, before: npt.NDArray[np.bool_], ngram: int, ignore_above: int) -> Indices:
    """The evaluation records, rows of the table, of which some n-gram has become one of too many records.

    Args:
        before: bool [T], the records that there were before.
    """
    sets = hashes(plain_words(texts_of(evaluation)), ngram, "word")
    rows = np.flatnonzero(before)
    known = members(sets, rows)
    common = _common(sets, evaluation, ignore_above)
    fresh = common[~np.isin(common, _common(known, evaluation.take(pa.array(rows)), ignore_above))]
    return np.asarray(rows[np.unique(set_of(known, np.flatnonzero(np.isin(known.values, fresh))))], dtype=np.int64)


def _common(sets: Shingles, evaluation: pa.Table, ignore_above: int | None) -> Hashes:
    """The members that are in too many sets; a record that stands in two suites counts once."""
    if ignore_above is None:
        return np.empty(0, dtype=np.uint64)
    _, first = np.unique(np.asarray(evaluation["id"].to_pylist(), dtype=str), return_index=True)
    values = np.sort(members(sets, first).values)
    starts = np.flatnonzero(np.append(True, values[1:] != values[:-1])[: len(values)])
    return values[starts[np.diff(starts, append=len(values)) > ignore_above]]


def narrow(values: Hashes) -> Hashes:
    """Fingerprints without their last 32 bits, which sketches do not hold."""
    return values >> np.uint64(32) << np.uint64(32)


def few_words(inputs: Sequence[str], ngram: int) -> tuple[list[str], Indices]:
    """The words of the inputs that have fewer than ``ngram`` of them, but one at least, and their rows."""
    rows = [row for row, text in enumerate(inputs) if len(text) < _SHORT_INPUT]
    words = plain_words([inputs[row] for row in rows])
    found = [(text, row) for row, text in zip(rows, words, strict=True) if 0 < len(text.split(None, ngram)) < ngram]
    return [text for text, _ in found], np.array([row for _, row in found], dtype=np.int64)


def _without(sets: Shingles, common: npt.NDArray[np.uint64]) -> Shingles:
    keep = ~np.isin(sets.values, common)
    before = np.concatenate([np.zeros(1, np.int64), np.cumsum(keep)])
    return Shingles(sets.values[keep], before[sets.offsets])
