"""Computes features of texts: hashed n-grams of words and characters, and sentence embeddings.

All runs of characters are hashed from one cumulative sum: with H[i] the sum of code[j] * P^j over j < i, modulo 2^64,
``(H[end] - H[start]) * P^-start`` depends on the characters alone, wherever they stand (Karp and Rabin, "Efficient
randomized pattern-matching algorithms", 1987). Multiplication by an odd constant, of which the upper bits are kept,
spreads the hashes over the buckets (Fibonacci hashing: Knuth, The Art of Computer Programming, volume 3, 6.4).
"""

from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from pydantic import Field

from posttrain.store.section import Section

_P = 0x5851F42D4C957F2D  # any odd number; only odd ones have an inverse modulo 2^64

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)

_CHARACTERS_A_CHUNK = 100_000  # a chunk stays in the processor's cache

Hashes = npt.NDArray[np.uint64]


class NgramSettings(Section):
    """The n-grams of words and characters that are features."""

    words: int = Field(2, ge=0, le=5, description="Longest run of words.")
    characters: list[int] = Field([4], description="Lengths of the runs of characters.")
    bits: int = Field(18, ge=8, le=26, description="Bits of a hash: there are 2 to the power of this many buckets.")
    longest: int = Field(20_000, ge=1, description="Characters of a text that are read, from its beginning.")

    @property
    def buckets(self) -> int:
        """B, the number of buckets."""
        return 1 << self.bits


class NgramFeatures(NamedTuple):
    """The F n-grams of some of the texts.

    Attributes:
        texts: the slice of the texts.
        rows: int64 [F], the text of each n-gram, within the slice.
        buckets: int64 [F].
        values: float64 [F]: 1 / sqrt(n-grams of its family in its text), so that no length stands out.
    """

    texts: slice
    rows: npt.NDArray[np.int64]
    buckets: npt.NDArray[np.int64]
    values: npt.NDArray[np.float64]


def ngram_features(texts: Sequence[str], ngrams: NgramSettings) -> Iterator[NgramFeatures]:
    """Yields the n-grams of the texts, a chunk of texts at a time; ignores case and amounts of whitespace."""
    start = 0
    while start < len(texts):
        chunk: list[bytes] = []
        characters, end = 0, start
        while end < len(texts) and (characters < _CHARACTERS_A_CHUNK or not chunk):
            normal = f" {' '.join(texts[end][: ngrams.longest].casefold().split())} "
            chunk.append(normal.encode("utf-32-le", "surrogatepass"))
            characters += len(normal)
            end += 1
        yield _chunk_features(chunk, slice(start, end), ngrams)
        start = end


def _chunk_features(chunk: Sequence[bytes], texts: slice, ngrams: NgramSettings) -> NgramFeatures:
    codes = np.frombuffer(b"".join(chunk), "<u4")
    owner = np.repeat(np.arange(len(chunk)), [len(encoded) // 4 for encoded in chunk])
    powers, inverses = _powers(1 << len(codes).bit_length())
    sums = np.zeros(len(codes) + 1, np.uint64)
    # Plus one, as a code of zero would vanish from the sum; overflow wraps modulo 2^64, as the scheme needs.
    np.cumsum((codes + np.uint64(1)) * powers[: len(codes)], out=sums[1:])
    rows, buckets, values = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)], [np.zeros(0)]

    def add(starts: npt.NDArray[np.int64], ends: npt.NDArray[np.int64], family: int) -> None:
        same = owner[starts] == owner[ends - 1]  # no n-gram spans two texts
        starts, ends = starts[same], ends[same]
        # The family keeps a word of four letters and the same run of characters in different buckets.
        hashes = (sums[ends] - sums[starts]) * inverses[starts] + np.uint64(family)
        hashes = (hashes ^ (hashes >> np.uint64(32))) * _GOLDEN
        text_rows = owner[starts]
        rows.append(text_rows)
        buckets.append((hashes >> np.uint64(64 - ngrams.bits)).astype(np.int64))
        values.append((1 / np.sqrt(np.maximum(1, np.bincount(text_rows, minlength=len(chunk)))))[text_rows])

    inside = _word_characters()[codes]
    edges = np.flatnonzero(np.diff(inside, prepend=False, append=False))
    firsts, lasts = edges[0::2], edges[1::2]
    for length in range(1, ngrams.words + 1):
        count = max(0, len(firsts) - length + 1)
        add(firsts[:count], lasts[length - 1 : length - 1 + count], -length % (1 << 32))
    for length in ngrams.characters:
        starts = np.arange(max(0, len(codes) - length + 1))
        add(starts, starts + length, length)
    return NgramFeatures(texts, np.concatenate(rows), np.concatenate(buckets), np.concatenate(values))


@cache
def _powers(size: int) -> tuple[Hashes, Hashes]:
    """Returns P^i and P^-i modulo 2^64 for i < ``size``."""
    both = []
    for base in (_P, pow(_P, -1, 1 << 64)):
        factors = np.full(size, base, np.uint64)
        factors[0] = 1
        both.append(np.cumprod(factors, dtype=np.uint64))
    return both[0], both[1]


@cache
def _word_characters() -> npt.NDArray[np.bool_]:
    """Returns bool [0x110000], the code points that are letters or digits."""
    return np.array([chr(code).isalnum() for code in range(0x110000)])


def embed_texts(name: str, texts: Sequence[str]) -> npt.NDArray[np.float32]:
    """Embeds texts with the model that `posttrain.models.embedder` knows by ``name``, float32 [N, D]."""
    return np.asarray(_load_embedder(name).embed(list(texts)), np.float32)


@cache
def _load_embedder(name: str) -> Any:
    from posttrain.models.embedder import Embedder

    return Embedder.load(name)
