"""Indexes hashed n-grams in two ways: by an inverted index of the sets that hold each, and by Bloom filters.

A Bloom filter says which n-grams a text certainly does not hold. A stretch of a text has one bit for each of 2,048
parts of the hashes of its n-grams, set if it holds an n-gram of that part: a Bloom filter with one hash (Bloom,
"Space/time trade-offs in hash coding with allowable errors", Communications of the ACM, 1970). An n-gram whose bit is
not set is absent, so the missing bits of a set of n-grams bound from below how many of it are missing.
"""

from collections.abc import Iterator
from typing import NamedTuple, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from posttrain.data.duplicates.shingles import Hashes, Indices, Shingles, offsets_of

_MOST_BITS = 24

_EXTRA_BITS = 3

_MEETINGS_A_BLOCK = 1 << 22

STRETCH = 1024
"""N-grams in one stretch: with as many different ones, two in five bits are set."""

_BITS = 2048

_WORDS = _BITS // 64

_BYTES = _BITS // 8

_WORDS_PER_STEP = _WORDS // 4

_WORDS_PER_BYTE = 3  # whose bits a byte can count


class SharedCounts(NamedTuple):
    """Lists pairs of sets that share members.

    Attributes:
        asked: int64 [P], the queried set.
        owner: int64 [P], the indexed set that shares members with it.
        shared: int64 [P], number of members in both.
    """

    asked: Indices
    owner: Indices
    shared: Indices


class Postings(NamedTuple):
    """Maps K distinct hashes to the indexed sets that hold each.

    Attributes:
        keys: uint64 [K], sorted.
        offsets: int64 [K + 1].
        owners: int32; the sets that hold key ``k`` are ``owners[offsets[k] : offsets[k + 1]]``, in order.
        table: bool [2^b], whether some key begins with these b bits: most hashes that are no keys end here.
        buckets: int32 [2^c], the first key that begins with these c bits or more.
        width: one more than the last owner.
    """

    keys: Hashes
    offsets: Indices
    owners: npt.NDArray[np.int32]
    table: npt.NDArray[np.bool_]
    buckets: npt.NDArray[np.int32]
    width: int

    @classmethod
    def of(cls, sets: Shingles, owners: Indices) -> Self:
        """Indexes ``sets``; ``owners``: int64 [N], the number that names each of the N sets."""
        named = np.repeat(owners, sets.sizes)
        order = np.argsort(sets.values)
        values, named = sets.values[order], named[order]
        tied = np.zeros(len(values), dtype=bool)  # few; to sort all by both takes three times as long
        equal = values[1:] == values[:-1]
        tied[1:] |= equal
        tied[:-1] |= equal
        named[tied] = named[tied][np.lexsort((named[tied], values[tied]))]
        fresh = np.ones(len(values), dtype=bool)
        fresh[1:] = (values[1:] != values[:-1]) | (named[1:] != named[:-1])
        values, named = values[fresh], named[fresh]
        first = np.ones(len(values), dtype=bool)
        np.not_equal(values[1:], values[:-1], out=first[1:])
        starts = np.flatnonzero(first)
        keys, counts = values[starts], np.diff(starts, append=len(values))
        bits = min(len(keys).bit_length() + 1, _MOST_BITS)
        table = np.zeros(1 << (bits + _EXTRA_BITS), dtype=bool)
        table[_leading_bits(keys, bits + _EXTRA_BITS)] = True
        buckets = offsets_of(np.bincount(_leading_bits(keys, bits).astype(np.int64), minlength=1 << bits))[:-1]
        width = int(named.max(initial=0)) + 1
        return cls(keys, offsets_of(counts), named.astype(np.int32), table, buckets.astype(np.int32), width)

    @property
    def counts(self) -> Indices:
        """Number of sets that hold each key, int64 [K]."""
        return np.diff(self.offsets)

    def among(self, wanted: npt.NDArray[np.bool_]) -> Self:
        """Keeps only some of the indexed sets; ``wanted``: bool, by owner."""
        chosen = wanted[self.owners]
        values, owners = np.repeat(self.keys, self.counts)[chosen], self.owners[chosen].astype(np.int64)
        return self.of(Shingles(values, np.arange(len(values) + 1)), owners)

    def find(self, values: Hashes) -> tuple[Indices, Indices]:
        """Positions in ``values`` that hold a key, in order, and the key at each."""
        if not len(self.keys):
            return np.empty(0, np.int64), np.empty(0, np.int64)
        places = np.flatnonzero(self.table[_leading_bits(values, len(self.table).bit_length() - 1)])
        asked = values[places]
        keys = self.buckets[_leading_bits(asked, len(self.buckets).bit_length() - 1)].astype(np.int64)
        held = self.keys[keys]
        # Few buckets hold two keys; those further back are reached step by step.
        behind = np.flatnonzero(held < asked)
        while len(behind):
            behind = behind[keys[behind] < len(self.keys) - 1]
            keys[behind] += 1
            held[behind] = self.keys[keys[behind]]
            behind = behind[held[behind] < asked[behind]]
        known = held == asked
        return places[known], keys[known]

    def meet(self, asked: Indices, keys: Indices, least: int = 1) -> Iterator[SharedCounts]:
        """Yields every pair of a queried and an indexed set that share members, block by block; no pair is split.

        Args:
            asked, keys: int64 [H], which set holds which key; in any order, and as often as it likes.
            least: members that a pair must share.
        """
        codes, _ = _count_values(asked * len(self.keys) + keys)
        asked, keys = codes // max(len(self.keys), 1), codes % max(len(self.keys), 1)
        sizes = self.offsets[keys + 1] - self.offsets[keys]
        if sizes.sum() <= _MEETINGS_A_BLOCK:
            yield self._met(asked, keys, sizes, least)
            return
        blocks = np.cumsum(sizes) // _MEETINGS_A_BLOCK
        blocks = blocks[np.searchsorted(asked, asked)]  # that of the set's first member
        for block in np.split(np.arange(len(asked)), np.flatnonzero(np.diff(blocks)) + 1):
            yield self._met(asked[block], keys[block], sizes[block], least)

    def _met(self, asked: Indices, keys: Indices, sizes: Indices, least: int) -> SharedCounts:
        width, begins = self.width, offsets_of(sizes)
        # Half the bytes are half the time.
        kind = np.int32 if (asked.max(initial=0) + 1) * width < 1 << 31 and len(self.owners) < 1 << 31 else np.int64
        places = np.arange(begins[-1], dtype=kind)
        places += np.repeat((self.offsets[keys] - begins[:-1]).astype(kind), sizes)
        codes = np.repeat((asked * width).astype(kind), sizes)
        codes += self.owners[places]
        pairs, shared = _count_values(codes, least)
        return SharedCounts(pairs // width, pairs % width, shared)


def owning_set(sets: Shingles, places: Indices) -> Indices:
    """Set that holds each of some positions in ``sets.values``, which are in order."""
    return np.repeat(np.arange(len(sets.sizes)), np.diff(np.searchsorted(places, sets.offsets)))


def _count_values(values: Indices, least: int = 1) -> tuple[Indices, Indices]:
    """Counts distinct values in order, if they occur often enough: faster than np.unique."""
    values = np.sort(values.astype(np.int32) if values.max(initial=0) < 1 << 31 else values)
    often = np.flatnonzero(values[least - 1 :] == values[: max(len(values) - least + 1, 0)])
    frequent = values[often]
    new = np.ones(len(frequent), dtype=bool)
    np.not_equal(frequent[1:], frequent[:-1], out=new[1:])
    starts = np.flatnonzero(new)
    return frequent[starts].astype(np.int64), np.diff(starts, append=len(frequent)) + least - 1


def _leading_bits(values: Hashes, bits: int) -> Hashes:
    return values >> np.uint64(64 - bits)


def build_bloom_filters(grams: Shingles, others: Shingles, rows: Indices) -> pa.Array:
    """Builds one binary value a text: the bitmaps of its stretches, 256 bytes each.

    Args:
        grams: N texts made by `posttrain.data.duplicates.shingles.ngram_sequences`.
        others: n-grams that count as held by the first stretch of the texts ``rows``, int64 [len(others)].
    """
    # Longer bitmaps would saturate: beyond 1,024 n-grams two in five bits are set.
    stretches = np.maximum(-(-grams.sizes // STRETCH), 1)
    first = offsets_of(stretches)
    sizes = np.full(int(first[-1]), STRETCH, dtype=np.int64)
    sizes[first[1:] - 1] = grams.sizes - (stretches - 1) * STRETCH
    bits = np.zeros(len(sizes) * _BITS, dtype=bool)
    bits[np.repeat(np.arange(len(sizes)) * _BITS, sizes) + _bit_of(grams.values)] = True
    beside = first[rows][owning_set(others, np.arange(len(others.values)))]
    bits[beside * _BITS + _bit_of(others.values)] = True
    content = np.packbits(bits)
    offsets = (first * _BYTES).astype(np.int32)
    return pa.Array.from_buffers(pa.binary(), len(stretches), [None, pa.py_buffer(offsets), pa.py_buffer(content)])


class BloomFilters:
    """Holds the bitmaps of N texts, and finds the texts that may hold enough of a set."""

    def __init__(self, column: pa.Array | pa.ChunkedArray) -> None:
        """``column``: made by `build_bloom_filters`."""
        array = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
        _, offsets, content = array.buffers()
        borders = np.frombuffer(offsets, np.int32)[array.offset : array.offset + len(array) + 1].astype(np.int64)
        bit_words = np.frombuffer(content or b"", np.uint64)[borders[0] // 8 : borders[-1] // 8].reshape(-1, _WORDS)
        self.first = (borders - borders[0]) // _BYTES
        self._absent = np.ascontiguousarray(~bit_words.T)
        """Words of bits, one column a stretch."""
        self._windows: dict[int, _Windows] = {}
        self._whole: dict[int, _Windows] = {}

    def near(self, members: Hashes, missing: int, stretches: int) -> Indices:
        """Finds texts that may hold all but ``missing`` members of a set in ``stretches`` consecutive stretches."""
        if stretches not in self._windows:
            self._windows[stretches] = self._in_a_row(stretches)
        absent, texts = self._windows[stretches]
        return np.unique(texts[_within_missing(members, missing, absent)])

    def near_long(self, members: Hashes, missing: int, stretches: int) -> Indices:
        """Finds longer texts, of more than ``stretches``, that may hold all but ``missing`` members anywhere."""
        if stretches not in self._whole:
            long = np.flatnonzero(np.diff(self.first) > stretches)
            absent = self._absent[:, :0]
            if len(long):
                absent = np.bitwise_and.reduceat(self._absent, self.first[:-1], axis=1).take(long, axis=1)
            self._whole[stretches] = _Windows(absent, long)
        absent, texts = self._whole[stretches]
        return texts[_within_missing(members, missing, absent)]

    def _in_a_row(self, stretches: int) -> "_Windows":
        counts = np.diff(self.first)
        end = np.repeat(self.first[1:], counts)
        # Windows double in length each pass, so w stretches take about log2 w passes.
        absent, joined = self._absent, 1
        while joined < min(stretches, int(counts.max(initial=1))):
            further = min(joined, stretches - joined)
            inside = np.flatnonzero(np.arange(absent.shape[1]) + further < end)
            longer = absent.copy()
            longer[:, inside] &= absent[:, inside + further]
            absent, joined = longer, joined + further
        # What begins nearer to the end of a text holds no more than the last whole one.
        begin = np.repeat(self.first[:-1], counts)
        kept = np.flatnonzero(np.arange(len(end)) <= np.maximum(begin, end - stretches))
        return _Windows(absent.take(kept, axis=1), np.repeat(np.arange(len(counts)), counts)[kept])


class _Windows(NamedTuple):
    """Holds the bits of consecutive stretches that are searched together.

    Attributes:
        absent: uint64 [32, W], the bits that none of a window's stretches has.
        texts: int64 [W], the text of each window.
    """

    absent: npt.NDArray[np.uint64]
    texts: Indices


def _bit_of(values: Hashes) -> Indices:
    return (values >> np.uint64(64 - _BITS.bit_length() + 1)).astype(np.int64)


def _within_missing(members: Hashes, missing: int, absent: npt.NDArray[np.uint64]) -> Indices:
    """Columns of ``absent`` that lack at most so many of the members' bits."""
    wanted = np.zeros(_BITS, dtype=bool)
    wanted[_bit_of(members)] = True
    wanted_words = np.packbits(wanted).view(np.uint64)
    likely = np.arange(absent.shape[1])
    count = np.zeros(len(likely), dtype=np.uint16)
    for start in range(0, _WORDS, _WORDS_PER_STEP):
        absent_words = absent[start : start + _WORDS_PER_STEP]
        count += _count_missing(
            wanted_words[start : start + _WORDS_PER_STEP],
            absent_words if len(likely) == absent_words.shape[1] else absent_words.take(likely, axis=1),
        )
        near = count <= missing
        # Columns are dropped only when half of them can go, as copying them costs as much as counting.
        if 2 * np.count_nonzero(near) < len(near) or start + _WORDS_PER_STEP == _WORDS:
            likely, count = likely[near], count[near]
    return likely


def _count_missing(wanted: npt.NDArray[np.uint64], missing: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint16]:
    """Counts the wanted bits that every stretch lacks."""
    count = np.zeros(missing.shape[1], dtype=np.uint16)
    bits, few, counted = np.empty_like(missing[0]), np.empty_like(count, np.uint8), np.empty_like(count, np.uint8)
    for first in range(0, len(wanted), _WORDS_PER_BYTE):
        counted[:] = 0
        for word in range(first, min(first + _WORDS_PER_BYTE, len(wanted))):
            np.bitwise_and(wanted[word], missing[word], out=bits)
            counted += np.bitwise_count(bits, out=few)
        count += counted
    return count
