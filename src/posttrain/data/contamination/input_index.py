"""Finds inputs of training records that are similar to, or contain, the input of an evaluation record.

Inputs are sets of character 5-grams. A training record must hold the share c of an evaluation input's set, both to
have a Jaccard similarity of c to it and to contain c of it. So of that set's n members, rarest first, it must hold
at least k of the first ``n - ceil(c * n) + k`` (prefix filtering): only those are indexed, and only the candidates that
they find are compared exactly.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from posttrain.data.arrays import Indices
from posttrain.data.contamination.postings import Postings
from posttrain.data.contamination.sketches import NGRAM, STRETCH, BloomFilters
from posttrain.data.duplicates.shingles import (
    Shingles,
    jaccard,
    ngram_sequences,
    ngram_sets,
    offsets_of,
    owning_set,
)
from posttrain.data.records.record import input_texts, plain_words

_MIN_STRETCH = 4096  # 5-grams; shorter stretches would repeat more work in their overlaps
_SHARE_NEEDED = 24  # one in so many members of a set has to match before the sets are compared
_MIN_NEEDED = 12  # 5-grams; fewer are shared by chance
_ROUNDING = 1e-9  # a product in float64 may lie just above a whole number, whose ceiling is one too many
_PART_BITS = 22  # of a hash, to count by: 32 MiB of counters, however many members there are


class SimilarInputs(NamedTuple):
    """Holds the best matching evaluation record of each training record, by row.

    Attributes:
        similar: Evaluation record, and Jaccard similarity of the two inputs.
        contained: Evaluation record, and the share of its input that the training record contains.
    """

    similar: dict[int, tuple[int, float]]
    contained: dict[int, tuple[int, float]]


class _Candidates(NamedTuple):
    """Lists pairs [P] of a training record and an evaluation record; ``begin``: position in the record's 5-grams."""

    row: Indices
    other: Indices
    begin: Indices


@dataclass(frozen=True)
class InputIndex:
    """Indexes the inputs of T evaluation records.

    Attributes:
        threshold: Jaccard similarity from which two inputs are alike.
        contained: Share of an evaluation input from which a record contains it; None: it is not looked for.
        least_words: Words from which an input is looked for inside longer records.
        sets: Their distinct 5-grams.
        needed: int64 [T], how many indexed 5-grams a record must hold to be a candidate.
        lengths: int64 [T], 5-grams counted as often as they occur in the input; 0 for inputs of few words.
        postings: The indexed 5-grams; owner: the evaluation record.
        stretch: 5-grams of a training record that are looked at together.
    """

    threshold: float
    contained: float | None
    least_words: int
    sets: Shingles
    needed: Indices
    lengths: Indices
    postings: Postings
    stretch: int

    @classmethod
    def from_records(cls, evaluation: pa.Table, threshold: float, contained: float | None, least_words: int) -> Self:
        """Indexes the inputs of a RECORD table; those of fewer than ``least_words`` words are contained in nothing."""
        texts = input_texts(evaluation)
        sets = ngram_sets(texts, NGRAM)
        # One prefix serves both searches, so it has to be long enough for the weaker condition.
        least = threshold if contained is None else min(threshold, contained)
        sizes = sets.sizes
        required = np.array([_required_members(least, size) for size in sizes.tolist()], dtype=np.int64)
        # The more are needed, the fewer are compared in vain, and the more are indexed.
        needed = np.minimum(np.maximum(sizes // _SHARE_NEEDED, _MIN_NEEDED), required)
        prefix = _rarest(sets, sizes - required + needed)
        word_texts = plain_words(texts)
        long = np.array([len(text.split(None, least_words)) >= least_words for text in word_texts], dtype=bool)
        lengths = np.where(long, ngram_sequences(texts, NGRAM).sizes, 0)
        longest = int(np.ceil(lengths.max(initial=0) / least))
        postings = Postings.from_sets(prefix, np.arange(len(texts)))
        return cls(threshold, contained, least_words, sets, needed, lengths, postings, max(_MIN_STRETCH, 2 * longest))

    def search(self, inputs: Sequence[str], texts: Sequence[str], pairs: list[tuple[int, int]]) -> SimilarInputs:
        """Finds the evaluation record most similar to each of N training records, of equals the first.

        Args:
            inputs: Input of every record.
            texts: Whole text of every record.
            pairs: List to which all matching training and evaluation records are added.
        """
        similar: dict[int, tuple[int, float]] = {}
        contained: dict[int, tuple[int, float]] = {}
        grams = ngram_sequences(texts, NGRAM)
        for likely in self._candidates(grams, inputs):
            rows, index = np.unique(likely.row, return_inverse=True)
            own = ngram_sets([inputs[row] for row in rows.tolist()], NGRAM)
            similarity = jaccard(own, self.sets, index, likely.other)
            enough_similar = similarity >= self.threshold
            _keep_best(
                similar, likely.row[enough_similar], likely.other[enough_similar], similarity[enough_similar], pairs
            )
            if self.contained is not None:
                # Containment is tried only where similarity, the stronger reason, has failed.
                rest = np.flatnonzero(~enough_similar & (self.lengths[likely.other] > 0))
                share = np.array([self._share(grams, *(int(column[pair]) for column in likely)) for pair in rest])
                enough = share >= self.contained
                rest = rest[enough]
                _keep_best(contained, likely.row[rest], likely.other[rest], share[enough], pairs)
        return SimilarInputs(similar, contained)

    def likely(self, filters: BloomFilters, least: Indices) -> Indices:
        """Finds all of N training records that are similar to an evaluation record or contain it, and few others.

        Args:
            filters: Bloom filters of their texts.
            least: int64 [N], how many different 5-grams the input has at least.
        """
        likely_rows = [np.empty(0, np.int64)]
        for other, (size, length) in enumerate(zip(self.sets.sizes.tolist(), self.lengths.tolist(), strict=True)):
            members = self.sets.values[self.sets.offsets[other] : self.sets.offsets[other + 1]]
            similar_spare = spare = size - _required_members(self.threshold, size)
            stretches = 1
            if self.contained is not None and length:
                spare = max(spare, size - _required_members(self.contained, size))
                # A window may begin anywhere in its first stretch, and so reach into one more than its length fills.
                stretches = -(-(_window_width(length, self.contained) - 1) // STRETCH) + 1
            likely_rows.append(filters.near(members, spare, stretches))
            long = filters.near_long(members, similar_spare, stretches)
            # The smaller of two sets is at least the share t of the larger if their Jaccard similarity is t.
            likely_rows.append(long[least[long] * self.threshold <= size + _ROUNDING])
        return np.unique(np.concatenate(likely_rows))

    def _candidates(self, grams: Shingles, inputs: Sequence[str]) -> Iterator[_Candidates]:
        """Yields candidates; long records are searched in overlapping stretches, as a long text holds most 5-grams."""
        # An input of fewer than 5 characters is a shingle of its own that all of the record does not have.
        short = np.array([row for row, text in enumerate(inputs) if len(text) < 2 * NGRAM], dtype=np.int64)
        # Stretches overlap by half: an input that fits into half a stretch lies in one of them as a whole.
        half = self.stretch // 2
        stretches = np.maximum(-(-grams.sizes // half) - 1, 1)
        first = offsets_of(stretches)
        at, keys = self.postings.find(grams.values)
        rows = owning_set(grams, at)
        number = (at - grams.offsets[rows]) // half
        last = np.minimum(number, stretches[rows] - 1)
        stretch = first[rows] + last
        # A position in the first half of one stretch lies in the second half of the one before.
        before = (number > 0) & (last == number)
        own = ngram_sequences([inputs[row] for row in short.tolist()], NGRAM)
        short_at, short_keys = self.postings.find(own.values)
        short_rows = short[owning_set(own, short_at)]
        stretch = np.concatenate([stretch, stretch[before] - 1, first[short_rows]])
        keys = np.concatenate([keys, keys[before], short_keys])
        least = int(self.needed.min()) if len(self.needed) else 1
        for counts in self.postings.meet(stretch, keys, least):
            good = counts.shared >= self.needed[counts.owner]
            stretch, other = counts.query[good], counts.owner[good]
            row = np.searchsorted(first, stretch, side="right") - 1
            yield _Candidates(row, other, (stretch - first[row]) * half)

    def _share(self, grams: Shingles, row: int, other: int, begin: int) -> float:
        """Returns the largest share of an evaluation input's 5-grams that occur close together in a stretch."""
        members = self.sets.values[self.sets.offsets[other] : self.sets.offsets[other + 1]]
        start = grams.offsets[row] + begin
        stretch = grams.values[start : min(start + self.stretch, grams.offsets[row + 1])]
        which = np.minimum(np.searchsorted(members, stretch), len(members) - 1)
        positions = np.flatnonzero(members[which] == stretch)
        assert self.contained is not None
        width = _window_width(int(self.lengths[other]), self.contained)
        members_present = which[positions]
        different = np.count_nonzero(np.bincount(members_present))
        if different < _required_members(self.contained, len(members)) or positions[-1] - positions[0] < width:
            return different / len(members)  # too few, or all together
        return _most_together(positions.tolist(), members_present.tolist(), width) / len(members)


def _required_members(share: float, size: int) -> int:
    """Returns the number of members of a set that make up that share of it."""
    return math.ceil(share * size - _ROUNDING)


def _window_width(length: int, contained: float) -> int:
    """Returns the number of consecutive 5-grams that may hold an input of ``length`` of them."""
    return math.ceil(length / contained)


def _most_together(positions: Sequence[int], members: Sequence[int], width: int) -> int:
    """Returns the largest number of distinct members whose positions lie in one window of ``width``."""
    counts: dict[int, int] = {}
    best = first = 0
    for position, member in zip(positions, members, strict=True):
        counts[member] = counts.get(member, 0) + 1
        while positions[first] <= position - width:
            leaving = members[first]
            counts[leaving] -= 1
            if not counts[leaving]:
                del counts[leaving]
            first += 1
        best = max(best, len(counts))
    return best


def _rarest(sets: Shingles, counts: Indices) -> Shingles:
    """Selects of every set the ``counts[n]`` rarest members; hashes that begin alike count together."""
    part = (sets.values >> np.uint64(64 - _PART_BITS)).astype(np.int64)
    frequency = np.minimum(np.bincount(part, minlength=1)[part], (1 << 16) - 1).astype(np.uint64)
    # Frequency above, hash below: one sort orders by both, and ties depend on nothing but the hash.
    rank = frequency << np.uint64(48) | sets.values >> np.uint64(16)
    positions = [np.empty(0, dtype=np.int64)]
    for begin, end, count in zip(sets.offsets[:-1].tolist(), sets.offsets[1:].tolist(), counts.tolist(), strict=True):
        positions.append(begin + np.argsort(rank[begin:end])[:count])
    return Shingles(sets.values[np.concatenate(positions)], offsets_of(np.minimum(counts, sets.sizes)))


def _keep_best(
    best: dict[int, tuple[int, float]],
    rows: Indices,
    others: Indices,
    values: npt.NDArray[np.float64],
    pairs: list[tuple[int, int]],
) -> None:
    """Adds all pairs, and keeps the best match of each row, of equals the first."""
    pairs += zip(rows.tolist(), others.tolist(), strict=True)
    for row, other, value in zip(rows.tolist(), others.tolist(), values.tolist(), strict=True):
        # Ties go to the first evaluation record, whatever order candidates come in.
        if row not in best or (-value, other) < (-best[row][1], best[row][0]):
            best[row] = (other, value)
