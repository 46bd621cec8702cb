"""Sketches training records for the search for contamination, by fingerprints of their words and Bloom filters.

Of each run of n words the smallest hash of the shorter runs within it is kept, so two texts that share a run of n words
share a fingerprint (Schleimer, Wilkerson and Aiken, "Winnowing: local algorithms for document fingerprinting", SIGMOD
2003). Neighbouring runs mostly keep the same one: a text of 13-grams has two fingerprints for five words.

A Bloom filter says which n-grams a text certainly does not hold. A stretch of a text has one bit for each of 2,048
parts of the hashes of its n-grams, set if it holds an n-gram of that part: a Bloom filter with one hash (Bloom,
"Space/time trade-offs in hash coding with allowable errors", Communications of the ACM, 1970). An n-gram whose bit is
not set is absent, so the missing bits of a set of n-grams bound from below how many of it are missing.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from posttrain.data.arrays import Hashes, Indices
from posttrain.data.duplicates.shingles import (
    Shingles,
    ngram_sequences,
    offsets_of,
    owning_set,
    select_sets,
)
from posttrain.data.records.record import input_texts, joined_texts, plain_words

NGRAM = 5
"""Characters of the n-grams by which inputs are compared."""

STRETCH = 1024
"""N-grams in one stretch: with as many different ones, two in five bits are set."""


_BITS = 2048


_WORDS = _BITS // 64


_BYTES = _BITS // 8


_WORDS_PER_STEP = _WORDS // 4


_WORDS_PER_BYTE = 3  # whose bits a byte can count


_SHORT_INPUT = 1024  # characters from which an input is not checked for few words


_WINDOW = 4  # shorter runs in a run; the more, the fewer fingerprints, and the more often they agree by chance


_CHARACTERS_A_BLOCK = 1 << 20


_KINDS = 4096  # of 5-grams, to count them by: 4 KiB a text


_UNREPEATED = 2 * NGRAM  # an input from which on its 5-grams are among those of the whole record


def contamination_sketch(table: pa.Table, ngram: int | None, alike: bool) -> pa.Table:
    """Sketches each row of a RECORD table in one row.

    ``input_id`` and ``group`` are the record's. ``runs``: list of uint32, fingerprints of its runs of words. ``grams``:
    bitmaps of its 5-grams. ``least``: int32, a lower bound of its input's distinct 5-grams, if there are
    several bitmaps.

    Args:
        ngram: Words in a run; None: no fingerprints.
        alike: True to build bitmaps.
    """
    blocks = [_sketch_block(block, ngram, alike) for block in _blocks_of_rows(table)] or [
        _sketch_block(table, ngram, alike)
    ]
    columns = [pa.concat_arrays([block[name] for block in blocks]) for name in blocks[0]]
    identities = table.select(["input_id", "group"])
    return pa.table([*identities.columns, *columns], names=[*identities.column_names, *blocks[0]])


def _blocks_of_rows(table: pa.Table) -> Iterator[pa.Table]:
    """Cuts the table into blocks whose hashes take little memory."""
    lengths = np.fromiter(map(len, joined_texts(table)), np.int64, table.num_rows)
    # Hashes take 8 bytes a character; blocks keep them in the processor's cache.
    cuts = np.flatnonzero(np.diff(np.cumsum(lengths) // _CHARACTERS_A_BLOCK)) + 1
    borders = [0, *cuts.tolist(), table.num_rows]
    for begin, end in pairwise(borders):
        yield table.slice(begin, end - begin)


def _sketch_block(table: pa.Table, ngram: int | None, alike: bool) -> dict[str, pa.Array]:
    inputs, texts = input_texts(table), joined_texts(table)
    columns: dict[str, pa.Array] = {}
    if ngram is not None:
        marks = _with_inputs(fingerprints(plain_words(texts), ngram), inputs, ngram)
        offsets, values = marks.offsets.astype(np.int32), (marks.values >> np.uint64(32)).astype(np.uint32)
        # 32 bits rule a row out nearly as well as 64, in half the space; the search itself compares all of them.
        columns["runs"] = pa.ListArray.from_arrays(pa.array(offsets), pa.array(values))
    if alike:
        grams = ngram_sequences(texts, NGRAM)
        short = np.array([row for row, text in enumerate(inputs) if len(text) < _UNREPEATED], dtype=np.int64)
        # An input of few characters has n-grams that the whole record lacks, so they are added to its bitmap.
        columns["grams"] = build_bloom_filters(
            grams, ngram_sequences([inputs[row] for row in short.tolist()], NGRAM), short
        )
        columns["least"] = pa.array(_min_distinct_grams(grams, inputs, texts))
    return columns


def _min_distinct_grams(grams: Shingles, inputs: Sequence[str], texts: Sequence[str]) -> npt.NDArray[np.int32]:
    least = np.zeros(len(texts), dtype=np.int32)
    # One bitmap shows how full it is; only texts of several need the bound.
    long = np.flatnonzero(grams.sizes > STRETCH)
    alone = np.array([inputs[row] == texts[row] for row in long.tolist()], dtype=bool)
    for rows, own in (
        # Where the input is all of the record, its 5-grams are hashed already.
        (long[alone], select_sets(grams, long[alone])),
        (long[~alone], ngram_sequences([inputs[row] for row in long[~alone].tolist()], NGRAM)),
    ):
        # Different 5-grams may be of one kind, and equal ones never of two: the number of kinds is a lower bound.
        kinds = np.zeros(len(rows) * _KINDS, dtype=bool)
        kinds[np.repeat(np.arange(len(rows)) * _KINDS, own.sizes) + (own.values % _KINDS).astype(np.int64)] = True
        least[rows] = kinds.reshape(-1, _KINDS).sum(axis=1)
    return least


def _with_inputs(marks: Shingles, inputs: list[str], ngram: int) -> Shingles:
    """Adds fingerprints of inputs of few words, which are also compared whole."""
    few, rows = short_inputs(inputs, ngram)
    whole = fingerprints(few, ngram)
    owner = np.concatenate(
        [owning_set(marks, np.arange(len(marks.values))), rows[owning_set(whole, np.arange(len(rows)))]]
    )
    order = np.argsort(owner, kind="stable")
    return Shingles(
        np.concatenate([marks.values, whole.values])[order], offsets_of(np.bincount(owner, minlength=len(inputs)))
    )


def short_inputs(inputs: Sequence[str], ngram: int) -> tuple[list[str], Indices]:
    """Returns the words and rows of inputs that have fewer than ``ngram`` words, but at least one."""
    rows = [row for row, text in enumerate(inputs) if len(text) < _SHORT_INPUT]
    word_texts = plain_words([inputs[row] for row in rows])
    short = [
        (text, row) for row, text in zip(rows, word_texts, strict=True) if 0 < len(text.split(None, ngram)) < ngram
    ]
    return [text for text, _ in short], np.array([row for _, row in short], dtype=np.int64)


def window_minima(word_texts: Sequence[str], ngram: int) -> Shingles:
    """Fingerprints every run of ``ngram`` words, at the run's position in
    `posttrain.data.duplicates.shingles.ngram_sequences`.

    Args:
        word_texts: Texts made by `posttrain.data.records.record.plain_words`; one of fewer words is one run.
    """
    window = min(_WINDOW, ngram)
    shorter = ngram_sequences(word_texts, ngram - window + 1, "word")
    least = shorter.values.copy()
    for further in range(1, window):
        np.minimum(least[:-further], shorter.values[further:], out=least[:-further])
    # A window at the end of a text reads on into the next one: it is no run, unless the text has no other.
    sizes = np.maximum(shorter.sizes - window + 1, 1)
    few = np.flatnonzero(shorter.sizes < window)
    if len(few):
        least[shorter.offsets[few]] = np.minimum.reduceat(shorter.values, shorter.offsets[:-1])[few]
    offsets = np.zeros(len(sizes) + 1, dtype=np.int64)
    np.cumsum(sizes, out=offsets[1:])
    positions = np.arange(offsets[-1]) + np.repeat(shorter.offsets[:-1] - offsets[:-1], sizes)
    return Shingles(least[positions], offsets)


def fingerprints(word_texts: Sequence[str], ngram: int) -> Shingles:
    """Fingerprints every text in text order, without equal neighbours. Arguments as in `window_minima`."""
    minima = window_minima(word_texts, ngram)
    new = np.ones(len(minima.values), dtype=bool)
    np.not_equal(minima.values[1:], minima.values[:-1], out=new[1:])
    new[minima.offsets[:-1]] = True
    before = np.concatenate([np.zeros(1, np.int64), np.cumsum(new)])
    return Shingles(minima.values[new], before[minima.offsets])


def build_bloom_filters(grams: Shingles, others: Shingles, rows: Indices) -> pa.Array:
    """Builds one binary value a text: the bitmaps of its stretches, 256 bytes each.

    Args:
        grams: N texts made by `posttrain.data.duplicates.shingles.ngram_sequences`.
        others: N-grams that count as held by the first stretch of the texts ``rows``, int64 [len(others)].
    """
    # Longer bitmaps would saturate: beyond 1,024 n-grams two in five bits are set.
    stretches = np.maximum(-(-grams.sizes // STRETCH), 1)
    first = offsets_of(stretches)
    sizes = np.full(int(first[-1]), STRETCH, dtype=np.int64)
    sizes[first[1:] - 1] = grams.sizes - (stretches - 1) * STRETCH
    bits = np.zeros(len(sizes) * _BITS, dtype=bool)
    bits[np.repeat(np.arange(len(sizes)) * _BITS, sizes) + _bit_of(grams.values)] = True
    first_stretch = first[rows][owning_set(others, np.arange(len(others.values)))]
    bits[first_stretch * _BITS + _bit_of(others.values)] = True
    content = np.packbits(bits)
    offsets = (first * _BYTES).astype(np.int32)
    return pa.Array.from_buffers(pa.binary(), len(stretches), [None, pa.py_buffer(offsets), pa.py_buffer(content)])


class BloomFilters:
    """Holds the bitmaps of N texts, and finds the texts that may hold enough of a set."""

    def __init__(self, column: pa.Array | pa.ChunkedArray) -> None:
        """Reads the bitmaps from a column that `build_bloom_filters` built."""
        array = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
        _, offsets, content = array.buffers()
        borders = np.frombuffer(offsets, np.int32)[array.offset : array.offset + len(array) + 1].astype(np.int64)
        bit_words = np.frombuffer(content or b"", np.uint64)[borders[0] // 8 : borders[-1] // 8].reshape(-1, _WORDS)
        self.first = (borders - borders[0]) // _BYTES
        self._absent = np.ascontiguousarray(~bit_words.T)
        """Words of bits, one column a stretch."""
        self._windows: dict[int, _StretchWindows] = {}
        self._whole: dict[int, _StretchWindows] = {}

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
            self._whole[stretches] = _StretchWindows(absent, long)
        absent, texts = self._whole[stretches]
        return texts[_within_missing(members, missing, absent)]

    def _in_a_row(self, stretches: int) -> "_StretchWindows":
        counts = np.diff(self.first)
        end = np.repeat(self.first[1:], counts)
        # Windows double in length each pass, so w stretches take about log2 w passes.
        absent, width = self._absent, 1
        while width < min(stretches, int(counts.max(initial=1))):
            further = min(width, stretches - width)
            inside = np.flatnonzero(np.arange(absent.shape[1]) + further < end)
            longer = absent.copy()
            longer[:, inside] &= absent[:, inside + further]
            absent, width = longer, width + further
        # What begins nearer to the end of a text holds no more than the last whole one.
        begin = np.repeat(self.first[:-1], counts)
        whole = np.flatnonzero(np.arange(len(end)) <= np.maximum(begin, end - stretches))
        return _StretchWindows(absent.take(whole, axis=1), np.repeat(np.arange(len(counts)), counts)[whole])


class _StretchWindows(NamedTuple):
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
    """Finds the columns of ``absent`` that lack at most so many of the members' bits."""
    needed = np.zeros(_BITS, dtype=bool)
    needed[_bit_of(members)] = True
    needed_words = np.packbits(needed).view(np.uint64)
    likely = np.arange(absent.shape[1])
    count = np.zeros(len(likely), dtype=np.uint16)
    for start in range(0, _WORDS, _WORDS_PER_STEP):
        absent_words = absent[start : start + _WORDS_PER_STEP]
        count += _count_missing(
            needed_words[start : start + _WORDS_PER_STEP],
            absent_words if len(likely) == absent_words.shape[1] else absent_words.take(likely, axis=1),
        )
        near = count <= missing
        # Columns are dropped only when half of them can go, as copying them costs as much as counting.
        if 2 * np.count_nonzero(near) < len(near) or start + _WORDS_PER_STEP == _WORDS:
            likely, count = likely[near], count[near]
    return likely


def _count_missing(needed: npt.NDArray[np.uint64], missing: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint16]:
    """Counts the needed bits that every stretch lacks."""
    count = np.zeros(missing.shape[1], dtype=np.uint16)
    bits, few, partial_count = np.empty_like(missing[0]), np.empty_like(count, np.uint8), np.empty_like(count, np.uint8)
    for first in range(0, len(needed), _WORDS_PER_BYTE):
        partial_count[:] = 0
        for word in range(first, min(first + _WORDS_PER_BYTE, len(needed))):
            np.bitwise_and(needed[word], missing[word], out=bits)
            partial_count += np.bitwise_count(bits, out=few)
        count += partial_count
    return count
