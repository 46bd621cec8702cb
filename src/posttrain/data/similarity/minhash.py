"""Sketches texts by MinHash: signatures cut into bands, and single bits of them.

Of two sets with Jaccard similarity s a minimum under a random permutation is the same with probability s (Broder,
"On the resemblance and containment of documents", 1997). With b bands of r minima each, the two agree in a whole
band with probability ``1 - (1 - s^r)^b`` (Leskovec, Rajaraman and Ullman, "Mining of Massive Datasets", ch. 3.4).
A single bit of a minimum agrees with probability (1 + s) / 2 (Li and König, "b-bit minwise hashing", WWW 2010), so
that 64 of them rule out most pairs that agree in a band by chance before any text is read.
"""

import math
from collections.abc import Sequence
from functools import lru_cache
from struct import Struct
from typing import NamedTuple, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from posttrain.data.arrays import Hashes
from posttrain.data.similarity.ngrams import Shingles, ngram_sequences, splitmix64

NGRAM = 5
"""Characters of an n-gram: a message of ten words has too few runs of words to survive one typo."""

_PERMUTATIONS = 128
_SEED = 0  # of the permutations: sketches of any two versions can be compared
_MISS_RATE = 0.001  # of pairs just at the threshold
_MISS_SHARE_OF_BANDS = 0.95  # of the misses; the comparison of bits may cause the rest
_BITS = 64  # one word, which a single instruction counts
_CHARACTERS_A_PIECE = 1 << 22  # 32 MiB of hashes
_SETS_A_PIECE = 256


class Banding(NamedTuple):
    """Divides a signature into ``bands`` bands of ``rows`` minima each."""

    bands: int
    rows: int


@lru_cache
def banding(threshold: float) -> Banding:
    """Finds the banding that proposes the fewest pairs below the threshold, of those that miss 0.1 % of pairs at it.

    The number of rows is that with the smallest ``integral from 0 to threshold of 1 - (1 - s^r)^b ds``; the number
    of bands follows from it: the fewest with ``(1 - threshold^r)^b`` at most 0.00095. The rest, up to 0.001, is
    the share that :func:`required_matching_bits` may miss. Bands times rows is at most 128, unless one row a band needs
    more.

    Raises:
        ValueError: the threshold lies outside (0, 1].
    """
    if not 0 < threshold <= 1:
        raise ValueError(f"threshold must lie in (0, 1], not {threshold}")
    similarity = np.linspace(0, threshold, 201)
    best, smallest_area = Banding(1, 1), math.inf
    for rows in range(1, _PERMUTATIONS + 1):
        bands = _bands_needed(threshold, rows)
        # At least one row a band is allowed, however many bands a low threshold needs.
        if rows > 1 and bands * rows > _PERMUTATIONS:
            break  # more rows take more bands too
        area = float(np.mean(1 - (1 - similarity**rows) ** bands))
        if area < smallest_area:
            best, smallest_area = Banding(bands, rows), area
    return best


def _bands_needed(threshold: float, rows: int) -> int:
    together = threshold**rows
    # log1p keeps its digits where the bands hardly ever agree.
    return 1 if together == 1 else math.ceil(math.log(_MISS_RATE * _MISS_SHARE_OF_BANDS) / math.log1p(-together))


def required_matching_bits(threshold: float) -> int:
    """Returns the number of 64 bits in which a pair at the threshold agrees, except for 0.005 % of such pairs.

    The greatest k with ``P(Binomial(64, (1 + threshold) / 2) < k)`` at most that.
    """
    chance = (1 + threshold) / 2
    below = 0.0
    for k in range(_BITS + 1):
        below += math.comb(_BITS, k) * chance**k * (1 - chance) ** (_BITS - k)
        if below > _MISS_RATE * (1 - _MISS_SHARE_OF_BANDS):
            return k
    return _BITS


def minhash_sketch(texts: Sequence[str], threshold: float = 0.8) -> pa.Table:
    """Sketches each text in one row; all columns are uint64: ``grams``, ``bits`` and ``band_0``, ``band_1`` ...

    Two texts share ``grams`` exactly when they have the same n-grams equally often; ``bits`` are the lowest bits
    of the first 64 minima; a band is a hash of its minima. A text's sketch depends on nothing but the text.
    """
    shape = banding(threshold)
    names = ["grams", "bits", *(f"band_{band}" for band in range(shape.bands))]
    pieces = [np.empty((0, len(names)), dtype=np.uint64)]
    lengths = np.cumsum([len(text) for text in texts]) // _CHARACTERS_A_PIECE
    for piece in np.split(np.arange(len(texts)), np.flatnonzero(np.diff(lengths)) + 1):
        if len(piece):
            pieces.append(_sketch_piece(ngram_sequences(texts[piece[0] : piece[-1] + 1], NGRAM), shape))
    return pa.table(dict(zip(names, map(pa.array, np.concatenate(pieces).T.copy()), strict=True)))


@lru_cache(maxsize=1)
def cached_minhash_sketch(texts: tuple[str, ...], threshold: float) -> pa.Table:
    """Caches the last `minhash_sketch`, as steps that follow each other need the same one."""
    return minhash_sketch(texts, threshold)


class Sketches(NamedTuple):
    """Holds the columns of N rows that `minhash_sketch` made.

    Attributes:
        grams: uint64 [N].
        bits: uint64 [N].
        bands: uint64 [N] each.
    """

    grams: Hashes
    bits: Hashes
    bands: Sequence[Hashes]

    @classmethod
    def from_table(cls, table: pa.Table) -> Self:
        """Reads the columns of `minhash_sketch` from a table that may have others, too."""
        bands = [name for name in table.column_names if name.startswith("band_")]
        if not bands:
            return cls(np.empty(0, np.uint64), np.empty(0, np.uint64), [])
        grams, bits, *keys = (np.asarray(table[name].to_numpy(), np.uint64) for name in ("grams", "bits", *bands))
        return cls(grams, bits, keys)


def _sketch_piece(shingles: Shingles, shape: Banding) -> npt.NDArray[np.uint64]:
    minima = signatures(shingles, shape.bands * shape.rows)
    # A sum does not depend on order, so texts with the same n-grams have the same value.
    grams = np.add.reduceat(shingles.values, shingles.offsets[:-1])
    lowest = np.zeros((len(minima), _BITS), dtype=np.uint8)
    # With fewer than 64 minima the missing bits are 0 in every sketch, and so agree.
    lowest[:, : minima.shape[1]] = minima[:, :_BITS] & 1
    bits = np.packbits(lowest, axis=1).view(np.uint64)
    # Odd weights are invertible modulo 2^64, so no minimum of a band is lost in its hash.
    weights = splitmix64(np.arange(1, shape.rows + 1, dtype=np.uint64)) | np.uint64(1)
    bands = splitmix64(minima.astype(np.uint64).reshape(len(minima), shape.bands, shape.rows) @ weights)
    return np.column_stack([grams, bits, bands])


def signatures(shingles: Shingles, permutations: int) -> npt.NDArray[np.uint32]:
    """Computes the minimum of every set under each permutation, uint32 [N, permutations]."""
    from rensa import RMinHash

    count, pack = len(shingles.offsets) - 1, Struct(f"{permutations}I").pack
    minima = np.empty((count, permutations), dtype=np.uint32)
    # rensa hands out Python numbers: few at a time stay in the processor's cache.
    for start in range(0, count, _SETS_A_PIECE):
        offsets = shingles.offsets[start : start + _SETS_A_PIECE + 1]
        values = shingles.values[offsets[0] : offsets[-1]]
        matrix = RMinHash.digest_matrix_from_flat_token_hashes(
            values, (offsets - offsets[0]).astype(np.uint64), permutations, _SEED
        )
        packed = b"".join([pack(*row) for row in matrix.to_rows()])
        minima[start : start + _SETS_A_PIECE] = np.frombuffer(packed, np.uint32).reshape(-1, permutations)
    return minima
