"""Inputs of training records that are like, or hold, the input of an evaluation record.

Inputs are sets of character 5-grams. A training record must hold the share c of an evaluation input's set, both to
have a Jaccard similarity of c to it and to contain c of it. So of that set's n members, rarest first, it must hold
at least k of the first ``n - ceil(c * n) + k`` (prefix filtering): only those are
indexed, and only what then is found is compared exactly.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from posttrain.data.normalise import input_texts
from posttrain.data.postings import Postings, set_of
from posttrain.data.shingles import Indices, Shingles, hashes, jaccard, offsets_of, runs

NGRAM = 5
LEAST_WORDS = 8
"""Words from which an evaluation input is looked for inside longer records. Shorter ones stand in many a text by
chance; GPT-3's shortest n-gram has 8 words for that reason (Brown et al. 2020, appendix C)."""

_LEAST_STRETCH = 4096
_SHARE_NEEDED = 8
_LEAST_NEEDED = 12
_ROUNDING = 1e-9


class Alike(NamedTuple):
    """By row of a training record the evaluation record, and how much of it there is.

    Attributes:
        similar: with the Jaccard similarity of the two inputs.
        contained: with the share of the evaluation input that stands in the training record.
    """

    similar: dict[int, tuple[int, float]]
    contained: dict[int, tuple[int, float]]


class _Candidates(NamedTuple):
    """Pairs [P] of a training record and an evaluation record; ``begin``: place in the record's 5-grams."""

    row: Indices
    other: Indices
    begin: Indices


@dataclass(frozen=True)
class InputIndex:
    """The inputs of T evaluation records.

    Attributes:
        threshold: Jaccard similarity from which two inputs are alike.
        contained: share of an evaluation input from which a record contains it; None: it is not looked for.
        sets: their distinct 5-grams.
        needed: int64 [T], how many indexed 5-grams a record must hold to be a candidate.
        lengths: int64 [T], 5-grams counted as often as they stand in the input; 0 for inputs of few words.
        postings: the indexed 5-grams; owner: the evaluation record.
        stretch: 5-grams of a training record that are looked at together.
    """

    threshold: float
    contained: float | None
    sets: Shingles
    needed: Indices
    lengths: Indices
    postings: Postings
    stretch: int

    @classmethod
    def of(cls, evaluation: pa.Table, threshold: float, contained: float | None) -> Self:
        """Index the inputs of a RECORD table."""
        texts = input_texts(evaluation)
        sets = hashes(texts, NGRAM)
        least = threshold if contained is None else min(threshold, contained)
        sizes = sets.sizes
        required = np.ceil(least * sizes - _ROUNDING).astype(np.int64)
        # The more are needed, the fewer are compared in vain, and the more are indexed.
        needed = np.minimum(np.maximum(sizes // _SHARE_NEEDED, _LEAST_NEEDED), required)
        prefix = _rarest(sets, sizes - required + needed)
        long = np.array([len(text.split(None, LEAST_WORDS)) >= LEAST_WORDS for text in texts], dtype=bool)
        lengths = np.where(long, runs(texts, NGRAM).sizes, 0)
        longest = int(np.ceil(lengths.max(initial=0) / least))
        postings = Postings.of(prefix, np.arange(len(texts)))
        return cls(threshold, contained, sets, needed, lengths, postings, max(_LEAST_STRETCH, 2 * longest))

    def search(self, inputs: Sequence[str], texts: Sequence[str], pairs: list[tuple[int, int]]) -> Alike:
        """The evaluation record that each of N training records is most like, of equals the first.

        Args:
            inputs: of every record.
            texts: all of every record.
            pairs: every training and evaluation record that are found are noted there.
        """
        similar: dict[int, tuple[int, float]] = {}
        contained: dict[int, tuple[int, float]] = {}
        grams = runs(texts, NGRAM)
        for likely in self._candidates(grams, inputs):
            rows, places = np.unique(likely.row, return_inverse=True)
            own = hashes([inputs[row] for row in rows.tolist()], NGRAM)
            similarity = jaccard(own, self.sets, places, likely.other)
            found = similarity >= self.threshold
            _note(similar, likely.row[found], likely.other[found], similarity[found], pairs)
            if self.contained is not None:
                rest = np.flatnonzero(~found & (self.lengths[likely.other] > 0))
                share = np.array([self._share(grams, *(int(column[pair]) for column in likely)) for pair in rest])
                enough = share >= self.contained
                rest = rest[enough]
                _note(contained, likely.row[rest], likely.other[rest], share[enough], pairs)
        return Alike(similar, contained)

    def _candidates(self, grams: Shingles, inputs: Sequence[str]) -> Iterator[_Candidates]:
        """Long records are looked at stretch by stretch, each half over the next: a long text holds most 5-grams."""
        # An input of fewer than 5 characters is a shingle of its own that all of the record does not have.
        short = np.array([row for row, text in enumerate(inputs) if len(text) < 2 * NGRAM], dtype=np.int64)
        half = self.stretch // 2
        stretches = np.maximum(-(-grams.sizes // half) - 1, 1)
        first = offsets_of(stretches)
        at, keys = self.postings.find(grams.values)
        rows = set_of(grams, at)
        number = (at - grams.offsets[rows]) // half
        here = np.minimum(number, stretches[rows] - 1)
        asked = first[rows] + here
        before = (number > 0) & (here == number)
        own = runs([inputs[row] for row in short.tolist()], NGRAM)
        short_at, short_keys = self.postings.find(own.values)
        short_rows = short[set_of(own, short_at)]
        asked = np.concatenate([asked, asked[before] - 1, first[short_rows]])
        keys = np.concatenate([keys, keys[before], short_keys])
        for meetings in self.postings.meet(asked, keys):
            good = meetings.shared >= self.needed[meetings.owner]
            asked, other = meetings.asked[good], meetings.owner[good]
            row = np.searchsorted(first, asked, side="right") - 1
            yield _Candidates(row, other, (asked - first[row]) * half)

    def _share(self, grams: Shingles, row: int, other: int, begin: int) -> float:
        """The largest part of an evaluation input's 5-grams that stand close together in a stretch of a record."""
        members = self.sets.values[self.sets.offsets[other] : self.sets.offsets[other + 1]]
        start = grams.offsets[row] + begin
        stretch = grams.values[start : min(start + self.stretch, grams.offsets[row + 1])]
        which = np.minimum(np.searchsorted(members, stretch), len(members) - 1)
        places = np.flatnonzero(members[which] == stretch)
        assert self.contained is not None
        width = int(np.ceil(self.lengths[other] / self.contained))
        return _most_together(places.tolist(), which[places].tolist(), width) / len(members)


def _most_together(places: Sequence[int], members: Sequence[int], width: int) -> int:
    """The most different members whose places lie in one window of ``width``."""
    counts: dict[int, int] = {}
    best = first = 0
    for place, member in zip(places, members, strict=True):
        counts[member] = counts.get(member, 0) + 1
        while places[first] <= place - width:
            gone = members[first]
            counts[gone] -= 1
            if not counts[gone]:
                del counts[gone]
            first += 1
        best = max(best, len(counts))
    return best


def _rarest(sets: Shingles, counts: Indices) -> Shingles:
    """Of every set the ``counts[n]`` members that stand in the fewest sets."""
    _, numbers, frequency = np.unique(sets.values, return_inverse=True, return_counts=True)
    owner = np.repeat(np.arange(len(sets.sizes)), sets.sizes)
    order = np.lexsort((sets.values, frequency[numbers], owner))
    place = np.arange(len(order)) - np.repeat(sets.offsets[:-1], sets.sizes)
    inside = place < np.repeat(counts, sets.sizes)
    return Shingles(sets.values[order][inside], offsets_of(np.minimum(counts, sets.sizes)))


def _note(
    best: dict[int, tuple[int, float]],
    rows: Indices,
    others: Indices,
    values: npt.NDArray[np.float64],
    pairs: list[tuple[int, int]],
) -> None:
    pairs += zip(rows.tolist(), others.tolist(), strict=True)
    for row, other, value in zip(rows.tolist(), others.tolist(), values.tolist(), strict=True):
        if row not in best or (-value, other) < (-best[row][1], best[row][0]):
            best[row] = (other, value)
