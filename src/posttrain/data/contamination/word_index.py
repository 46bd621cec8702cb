"""Finds runs of words that training and evaluation records share."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from posttrain.data.arrays import Hashes, Indices
from posttrain.data.contamination.postings import Postings
from posttrain.data.contamination.sketches import fingerprints, short_inputs, window_minima
from posttrain.data.duplicates.shingles import (
    Shingles,
    distinct,
    ngram_sequences,
    ngram_sets,
    owning_set,
    select_sets,
)
from posttrain.data.records.record import input_texts, joined_texts, plain_words

_IGNORE_ABOVE = 10  # records; GPT-3 ignored runs of words in more than 10 documents


class Overlap(NamedTuple):
    """Measures the runs of words that a training record shares with one evaluation record.

    Attributes:
        other: The evaluation record's row.
        shared: Distinct n-grams that both have.
        own: N-grams of the training record.
        others: N-grams of the evaluation record.
        whole: True if both are shorter than an n-gram, and the same.
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
    """Indexes the word n-grams of T evaluation records, prompt and answers in one.

    Attributes:
        ngram: Words in a run.
        share: Least part of either record's n-grams that must be shared; at 0 one n-gram is enough.
        sizes: int64 [T], n-grams of every evaluation record.
        postings: The n-grams; owner: the evaluation record.
        short: Inputs of fewer than ``ngram`` words, whole; owner: the evaluation record.
        marks: The first 32 bits of the fingerprints of all of these (`posttrain.data.contamination.sketches`); owner:
            the evaluation record.
    """

    ngram: int
    share: float
    sizes: Indices
    postings: Postings
    short: Postings
    marks: Postings

    @classmethod
    def from_records(cls, evaluation: pa.Table, ngram: int, share: float) -> Self:
        """Indexes a RECORD table, without the wording of the task."""
        rows = np.arange(evaluation.num_rows)
        word_texts = plain_words(joined_texts(evaluation))
        sets = ngram_sets(word_texts, ngram, "word")
        # Two records without any word are both the n-gram of the empty text, which must not count as shared words.
        common = np.concatenate([ngram_sets([""], ngram, "word").values, _common_ngrams(sets, evaluation)])
        sets = _without_ngrams(sets, common)
        short_texts, short = short_inputs(input_texts(evaluation), ngram)
        least, distinctive = (
            window_minima(word_texts, ngram),
            ~np.isin(ngram_sequences(word_texts, ngram, "word").values, common),
        )
        marks = np.concatenate([least.values[distinctive], fingerprints(short_texts, ngram).values])
        owners = np.concatenate([np.repeat(rows, least.sizes)[distinctive], short])
        return cls(
            ngram,
            share,
            sets.sizes,
            Postings.from_sets(sets, rows),
            Postings.from_sets(ngram_sets(short_texts, ngram, "word"), short),
            Postings.from_sets(Shingles(truncate_fingerprints(marks), np.arange(len(marks) + 1)), owners),
        )

    def search(self, inputs: Sequence[str], texts: Sequence[str], pairs: list[tuple[int, int]]) -> dict[int, Overlap]:
        """Finds the evaluation record that shares the most n-grams with each of N training records, of equals the
        first.

        Args:
            inputs: Input of every record.
            texts: Whole text of every record.
            pairs: List to which all matching training and evaluation records are added.
        """
        best: dict[int, Overlap] = {}
        sets = ngram_sequences(plain_words(texts), self.ngram, "word")
        positions, keys = self.postings.find(sets.values)
        rows = owning_set(sets, positions)
        # Distinct n-grams take a sort; only rows that share one need their number.
        matching_rows = np.unique(rows)
        sizes = np.zeros(len(texts), dtype=np.int64)
        sizes[matching_rows] = distinct(select_sets(sets, matching_rows)).sizes
        for counts in self.postings.meet(rows, keys):
            for row, other, shared in zip(*(values.tolist() for values in counts), strict=True):
                overlap = Overlap(other, shared, int(sizes[row]), int(self.sizes[other]))
                if overlap.score < self.share:
                    continue
                pairs.append((row, other))
                # Ties go to the first evaluation record, so that the detail is the same in whatever order they are met.
                if row not in best or (-shared, other) < (-best[row].shared, best[row].other):
                    best[row] = overlap
        few, short = short_inputs(inputs, self.ngram)
        positions, keys = self.short.find(ngram_sequences(few, self.ngram, "word").values)
        for row, key in zip(short[positions].tolist(), keys.tolist(), strict=True):
            others = self.short.owners[self.short.offsets[key] : self.short.offsets[key + 1]].tolist()
            pairs += ((row, other) for other in others)
            # Equal inputs are the stronger finding, and replace what shared runs have put here.
            best[row] = Overlap(others[0], 1, 1, 1, whole=True)
        return best


def newly_common(evaluation: pa.Table, before: npt.NDArray[np.bool_], ngram: int) -> Indices:
    """Finds the evaluation records, rows of the table, with an n-gram that too many records have come to hold.

    Args:
        before: bool [T], the records that there were before.
    """
    sets = ngram_sets(plain_words(joined_texts(evaluation)), ngram, "word")
    rows = np.flatnonzero(before)
    old_sets = select_sets(sets, rows)
    common = _common_ngrams(sets, evaluation)
    fresh = common[~np.isin(common, _common_ngrams(old_sets, evaluation.take(pa.array(rows))))]
    return np.asarray(
        rows[np.unique(owning_set(old_sets, np.flatnonzero(np.isin(old_sets.values, fresh))))], dtype=np.int64
    )


def _common_ngrams(sets: Shingles, evaluation: pa.Table) -> Hashes:
    """Returns the members that too many sets hold: the wording of the task."""
    # A record of two suites is one record, not two uses of its wording.
    _, first = np.unique(np.asarray(evaluation["id"].to_pylist(), dtype=str), return_index=True)
    values = np.sort(select_sets(sets, first).values)
    starts = np.flatnonzero(np.append(True, values[1:] != values[:-1])[: len(values)])
    return values[starts[np.diff(starts, append=len(values)) > _IGNORE_ABOVE]]


def truncate_fingerprints(values: Hashes) -> Hashes:
    """Drops the last 32 bits, which sketches do not hold."""
    return values >> np.uint64(32) << np.uint64(32)


def _without_ngrams(sets: Shingles, common: npt.NDArray[np.uint64]) -> Shingles:
    keep = ~np.isin(sets.values, common)
    before = np.concatenate([np.zeros(1, np.int64), np.cumsum(keep)])
    return Shingles(sets.values[keep], before[sets.offsets])
