"""Bitmaps that tell which runs of characters a text certainly does not hold.

A stretch of a text has one bit for each of 2,048 parts of the hashes of its n-grams, set where it holds one of that
part: a Bloom filter with one hash (Bloom, "Space/time trade-offs in hash coding with allowable errors",
Communications of the ACM, 1970). An n-gram whose bit is not set is not there, so that the bits of a set of n-grams
that are missing say how many of the set a stretch misses at least.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from posttrain.data.contamination.postings import set_of
from posttrain.data.duplicates.shingles import Hashes, Indices, Shingles, offsets_of

STRETCH = 1024
"""N-grams in one stretch: with as many different ones, two in five bits are set."""

_BITS = 2048
_WORDS = _BITS // 64
_BYTES = _BITS // 8
_WORDS_A_STEP = _WORDS // 4
_WORDS_A_BYTE = 3  # whose bits a byte can count


def gram_filters(grams: Shingles, others: Shingles, rows: Indices) -> pa.Array:
    """One binary value a text: the bitmaps of its stretches, 256 bytes each.

    Args:
        grams: N texts made by `posttrain.data.duplicates.shingles.runs`.
        others: n-grams that count as held by the first stretch of the texts ``rows``, int64 [len(others)].
    """
    stretches = np.maximum(-(-grams.sizes // STRETCH), 1)
    first = offsets_of(stretches)
    sizes = np.full(int(first[-1]), STRETCH, dtype=np.int64)
    sizes[first[1:] - 1] = grams.sizes - (stretches - 1) * STRETCH
    bits = np.zeros(len(sizes) * _BITS, dtype=bool)
    bits[np.repeat(np.arange(len(sizes)) * _BITS, sizes) + _bit(grams.values)] = True
    beside = first[rows][set_of(others, np.arange(len(others.values)))]
    bits[beside * _BITS + _bit(others.values)] = True
    content = np.packbits(bits)
    offsets = (first * _BYTES).astype(np.int32)
    return pa.Array.from_buffers(pa.binary(), len(stretches), [None, pa.py_buffer(offsets), pa.py_buffer(content)])


class GramFilters:
    """The bitmaps of N texts, to be asked which texts may hold enough of a set."""

    def __init__(self, column: pa.Array | pa.ChunkedArray) -> None:
        """``column``: made by `gram_filters`."""
        array = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
        _, offsets, content = array.buffers()
        borders = np.frombuffer(offsets, np.int32)[array.offset : array.offset + len(array) + 1].astype(np.int64)
        words = np.frombuffer(content or b"", np.uint64)[borders[0] // 8 : borders[-1] // 8].reshape(-1, _WORDS)
        self.first = (borders - borders[0]) // _BYTES
        self._absent = np.ascontiguousarray(~words.T)
        """Words of bits, one column a stretch."""
        self._windows: dict[int, _Windows] = {}
        self._whole: dict[int, _Windows] = {}

    def near(self, members: Hashes, missing: int, stretches: int) -> Indices:
        """The texts that may hold all but ``missing`` members of a set in ``stretches`` one behind the other."""
        if stretches not in self._windows:
            self._windows[stretches] = self._in_a_row(stretches)
        absent, texts = self._windows[stretches]
        return np.unique(texts[_near(members, missing, absent)])

    def near_long(self, members: Hashes, missing: int, stretches: int) -> Indices:
        """Of the texts of more stretches than that those that may hold all but ``missing`` members anywhere."""
        if stretches not in self._whole:
            long = np.flatnonzero(np.diff(self.first) > stretches)
            absent = self._absent[:, :0]
            if len(long):
                absent = np.bitwise_and.reduceat(self._absent, self.first[:-1], axis=1).take(long, axis=1)
            self._whole[stretches] = _Windows(absent, long)
        absent, texts = self._whole[stretches]
        return texts[_near(members, missing, absent)]

    def _in_a_row(self, stretches: int) -> "_Windows":
        counts = np.diff(self.first)
        end = np.repeat(self.first[1:], counts)
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
    """Stretches looked at together.

    Attributes:
        absent: uint64 [32, W], the bits that none of a window's stretches has.
        texts: int64 [W], the text of each window.
    """

    absent: npt.NDArray[np.uint64]
    texts: Indices


def _bit(values: Hashes) -> Indices:
    return (values >> np.uint64(64 - _BITS.bit_length() + 1)).astype(np.int64)


def _near(members: Hashes, missing: int, absent: npt.NDArray[np.uint64]) -> Indices:
    """The columns of ``absent`` that miss at most so many of the members' bits."""
    wanted = np.zeros(_BITS, dtype=bool)
    wanted[_bit(members)] = True
    words = np.packbits(wanted).view(np.uint64)
    likely = np.arange(absent.shape[1])
    count = np.zeros(len(likely), dtype=np.uint16)
    for start in range(0, _WORDS, _WORDS_A_STEP):
        some = absent[start : start + _WORDS_A_STEP]
        count += _missed(
            words[start : start + _WORDS_A_STEP], some if len(likely) == some.shape[1] else some.take(likely, axis=1)
        )
        near = count <= missing
        if 2 * np.count_nonzero(near) < len(near) or start + _WORDS_A_STEP == _WORDS:
            likely, count = likely[near], count[near]
    return likely


def _missed(wanted: npt.NDArray[np.uint64], missing: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint16]:
    """How many bits of the words wanted every stretch misses."""
    count = np.zeros(missing.shape[1], dtype=np.uint16)
    bits, few, some = np.empty_like(missing[0]), np.empty_like(count, np.uint8), np.empty_like(count, np.uint8)
    for first in range(0, len(wanted), _WORDS_A_BYTE):
        some[:] = 0
        for word in range(first, min(first + _WORDS_A_BYTE, len(wanted))):
            np.bitwise_and(wanted[word], missing[word], out=bits)
            some += np.bitwise_count(bits, out=few)
        count += some
    return count
