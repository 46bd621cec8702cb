"""Represents texts as hashed n-grams of characters or of words, and counts exactly what two sets share.

An n-gram is hashed as a polynomial of its characters' code points (or of its words' hashes) modulo 2^64 (Karp and
Rabin, "Efficient randomized pattern-matching algorithms", IBM Journal of Research and Development, 1987), and then
mixed by a bijection, so that the hashes are spread evenly. Two different n-grams share a hash with a probability of
about 2^-64; that is the one inexactness of all that is built on the hashes.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as compute
import xxhash

from posttrain.data.arrays import Hashes, Indices, Mask
from posttrain.data.records.record import fold_case, is_nearly_ascii, plain_words

Codes = npt.NDArray[np.unsignedinteger[Any]]

_CHARACTERS_A_BLOCK = 1 << 16  # 512 KiB of hashes fit a processor's cache
_MEMBERS_A_CHUNK = 1 << 22  # 32 MiB of hashes
_BASE = 0x9E3779B97F4A7C15
_SPACES = bytes(code for code in range(128) if chr(code).isspace())
_FOLD = bytes.maketrans(_SPACES, b" " * len(_SPACES)).lower()
_SPACE = 32


class Shingles(NamedTuple):
    """Concatenates N sets: set ``n`` is ``values[offsets[n] : offsets[n + 1]]``.

    Attributes:
        values: uint64 [M]; within a set sorted and distinct.
        offsets: int64 [N + 1], from 0 to M.
    """

    values: Hashes
    offsets: Indices

    @property
    def sizes(self) -> Indices:
        """Number of members of every set, int64 [N]."""
        return np.diff(self.offsets)


def ngram_sets(texts: Sequence[str], ngram: int) -> Shingles:
    """Hashes the set of character n-grams of every text: 8 bytes a character, so pass large sets in pieces.

    Texts are compared in the form of `posttrain.data.records.record.fold_case`. A text of fewer than ``ngram``
    characters is one shingle. A hash depends on nothing but the n-gram.

    Raises:
        ValueError: ``ngram`` is below 1.
    """
    return distinct(ngram_sequences(texts, ngram))


def ngram_sequences(texts: Sequence[str], ngram: int) -> Shingles:
    """Hashes the character n-grams in text order and with repetitions: faster than `ngram_sets`."""
    if ngram < 1:
        raise ValueError(f"an n-gram has at least one character, not {ngram}")
    values, sizes = [np.empty(0, np.uint64)], [np.empty(0, np.int64)]
    for block in _blocks(texts):
        codes, lengths = _codes(block)
        hashes, inside = _rolling(codes, lengths, ngram)
        starts = np.cumsum(lengths + 1) - lengths - 1
        # Texts shorter than an n-gram are one shingle, or they would equal every other short text.
        for length in np.unique(lengths[lengths < ngram]).tolist():
            short = starts[lengths == length]
            hashes[short] = splitmix64(_polynomials(codes, length)[short] + _tag(length)) if length else _tag(0)
            inside[short] = True
        values.append(hashes[inside])
        sizes.append(np.maximum(lengths - ngram + 1, 1))
    return Shingles(np.concatenate(values), offsets_of(np.concatenate(sizes)))


def hash_words(texts: Sequence[str]) -> Shingles:
    """Hashes the words of every text, in the form of `posttrain.data.records.record.plain_words` and in text order."""
    plain = [text.strip() for text in plain_words(texts)]
    lists = compute.ascii_split_whitespace(pa.array(plain, pa.large_string()))
    words, starts = lists.flatten().dictionary_encode(), lists.offsets.to_numpy()
    # Each different word is hashed once.
    different = words.dictionary.to_pylist()
    hashes = np.array([xxhash.xxh3_64_intdigest(word.encode()) for word in different], dtype=np.uint64)
    # An empty text is split into one empty word, which is not a word.
    empty = np.array([not text for text in plain], dtype=bool)
    values = np.delete(hashes[words.indices.to_numpy()], starts[:-1][empty])
    return Shingles(values, offsets_of(np.where(empty, 0, np.diff(starts))))


def word_runs(words: Shingles, length: int) -> Shingles:
    """Hashes every run of ``length`` words of texts that `hash_words` has hashed; shorter texts have none."""
    sizes = words.sizes
    # A zero behind each text keeps runs from spanning two texts.
    codes = np.insert(words.values, words.offsets[1:], np.uint64(0))
    hashes, inside = _rolling(codes, sizes, length)
    return Shingles(hashes[inside], offsets_of(np.maximum(sizes - length + 1, 0)))


def offsets_of(sizes: Indices) -> Indices:
    """Returns the offsets of concatenated sets of these sizes: int64 [N + 1]."""
    offsets = np.zeros(len(sizes) + 1, dtype=np.int64)
    np.cumsum(sizes, out=offsets[1:])
    return offsets


def intersections(a: Shingles, b: Shingles, i: Indices, j: Indices) -> Indices:
    """Counts the members that set ``i[p]`` of ``a`` and set ``j[p]`` of ``b`` share, int64 [P]."""
    shared = np.zeros(len(i), dtype=np.int64)
    # Chunks bound the memory: both sets of every pair are copied.
    work = np.cumsum(a.sizes[i] + b.sizes[j]) // _MEMBERS_A_CHUNK
    for chunk in np.split(np.arange(len(i)), np.flatnonzero(np.diff(work)) + 1):
        shared[chunk] = _intersections(a, b, i[chunk], j[chunk])
    return shared


def jaccard(a: Shingles, b: Shingles, i: Indices, j: Indices) -> npt.NDArray[np.float64]:
    """Computes the Jaccard similarity of set ``i[p]`` of ``a`` and ``j[p]`` of ``b``, shared members over all: [P]."""
    shared = intersections(a, b, i, j)
    return np.asarray(shared / (a.sizes[i] + b.sizes[j] - shared), dtype=np.float64)


def splitmix64(values: Hashes) -> Hashes:
    """Mixes 64 bits bijectively, so that every bit depends on every bit (splitmix64's finaliser; Steele, Lea and Flood,
    "Fast splittable pseudorandom number generators", OOPSLA 2014).
    """
    shifted = values >> np.uint64(30)
    mixed = values ^ shifted
    mixed *= np.uint64(0xBF58476D1CE4E5B9)
    mixed ^= np.right_shift(mixed, np.uint64(27), out=shifted)
    mixed *= np.uint64(0x94D049BB133111EB)
    mixed ^= np.right_shift(mixed, np.uint64(31), out=shifted)
    return mixed


def select_sets(sets: Shingles, rows: Indices) -> Shingles:
    """Selects some of the sets, in the order given."""
    sizes = sets.sizes[rows]
    offsets = offsets_of(sizes)
    positions = np.arange(offsets[-1]) + np.repeat(sets.offsets[rows] - offsets[:-1], sizes)
    return Shingles(sets.values[positions], offsets)


def distinct(sets: Shingles) -> Shingles:
    """Removes repeated members; sorts ``sets.values`` in place, set by set, of which none is empty."""
    values, offsets = sets
    _sort(values, offsets)
    new = np.ones(len(values), dtype=bool)
    np.not_equal(values[1:], values[:-1], out=new[1:])
    new[offsets[:-1]] = True
    before = np.zeros(len(values) + 1, dtype=np.int64)
    np.cumsum(new, out=before[1:])
    return Shingles(values[new], before[offsets])


def _intersections(a: Shingles, b: Shingles, i: Indices, j: Indices) -> Indices:
    """Merges both sets of a pair by sorting; values that occur twice are shared."""
    left, right = select_sets(a, i), select_sets(b, j)
    sizes = left.sizes + right.sizes
    offsets = offsets_of(sizes)
    both = np.empty(offsets[-1], dtype=np.uint64)
    both[np.arange(len(left.values)) + np.repeat(offsets[:-1] - left.offsets[:-1], left.sizes)] = left.values
    both[np.arange(len(right.values)) + np.repeat(offsets[1:] - right.offsets[1:], right.sizes)] = right.values
    _sort(both, offsets, "stable")  # merges the two sorted halves
    twice = np.zeros(len(both) + 1, dtype=np.int64)
    np.cumsum(both[1:] == both[:-1], out=twice[1:-1])
    # An equal neighbour across the border of two pairs is counted at the border and left out here.
    return twice[np.maximum(offsets[1:] - 1, 0)] - twice[offsets[:-1]] if len(i) else np.zeros(0, np.int64)


def _sort(values: Hashes, offsets: Indices, kind: Literal["quicksort", "stable"] = "quicksort") -> None:
    for begin, end in pairwise(offsets.tolist()):
        values[begin:end].sort(kind=kind)


def _blocks(texts: Sequence[str]) -> list[Sequence[str]]:
    """Cuts ``texts`` into blocks that fit a processor's cache."""
    lengths = np.fromiter(map(len, texts), np.int64, len(texts))
    cuts = np.flatnonzero(np.diff(np.cumsum(lengths + 1) // _CHARACTERS_A_BLOCK)) + 1
    borders = [0, *cuts.tolist(), len(texts)]
    return [texts[begin:end] for begin, end in pairwise(borders)] if len(texts) else []


def _codes(texts: Sequence[str]) -> tuple[Codes, Indices]:
    """Returns the code points of the comparable texts, each followed by a space, and the lengths without it."""
    stripped = [text.strip() if is_nearly_ascii(text) else fold_case(text) for text in texts]
    lengths = np.fromiter(map(len, stripped), np.int64, len(stripped))
    text = " ".join(stripped) + " "
    # Characters beyond ASCII become `?` here, and come back from UTF-32 below: most texts need no wider codes.
    codes: Codes = np.frombuffer(text.encode("ascii", "replace").translate(_FOLD), dtype=np.uint8)
    if not text.isascii():
        # A lone surrogate must not raise: any string can be hashed.
        wide = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype=np.uint32)
        codes = np.where(wide < 128, codes, wide)
    ends = np.cumsum(lengths + 1)
    # Of a run of spaces the last stays; the texts are stripped, so that the space behind a text follows no other.
    surplus = np.zeros(len(codes), dtype=bool)
    np.logical_and(codes[:-1] == _SPACE, codes[1:] == _SPACE, out=surplus[:-1])
    # The space behind a text separates it from the next, even if a text is empty.
    surplus[ends - 1] = False
    if surplus.any():
        positions = np.flatnonzero(surplus)
        lengths = lengths - np.diff(np.searchsorted(positions, ends), prepend=0)
        codes = codes[~surplus]
    return codes, lengths


def _tag(length: int) -> Hashes:
    """Distinguishes runs of different lengths, whatever they begin with."""
    return splitmix64(np.array([length], dtype=np.uint64))


def _rolling(codes: Codes, lengths: Indices, ngram: int) -> tuple[Hashes, Mask]:
    """Hashes the n-gram at every code, and tells which lie within a text; one code behind each text separates it."""
    ends = np.cumsum(lengths + 1)
    starts = ends - lengths - 1
    # Polynomial hashes of neighbouring n-grams are correlated; MinHash needs evenly spread bits.
    values = splitmix64(_polynomials(codes, ngram) + _tag(ngram))
    inside = np.ones(len(codes), dtype=bool)
    for back in range(1, ngram + 1):
        inside[np.maximum(ends - back, starts)] = False
    return values, inside


def _polynomials(codes: Codes, length: int) -> Hashes:
    """Computes the polynomial of the ``length`` codes from every position on, zeros behind the end: [len(codes)].

    That of 2k codes follows from those of its halves, so that n codes take about log2 n passes.
    """
    doubled = np.zeros(len(codes) + length, dtype=np.uint64)
    doubled[: len(codes)] = codes
    total, length_so_far = np.zeros(0, np.uint64), 0
    size, power = 1, _BASE
    while True:
        if length & size:
            total = doubled if not length_so_far else _join_polynomials(total, doubled, length_so_far, power)
            length_so_far += size
        if length_so_far == length:
            return total[: len(codes)]
        doubled = _join_polynomials(doubled, doubled, size, power)
        size, power = 2 * size, power * power % (1 << 64)


def _join_polynomials(first: Hashes, second: Hashes, length: int, power: int) -> Hashes:
    """Extends polynomials of the ``length`` codes of ``first`` by those of ``second``."""
    total = first[: len(second) - length] * np.uint64(power)
    total += second[length:]
    return total
