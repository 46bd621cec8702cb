"""Finds candidates for near duplicates: MinHash signatures cut into bands, and the buckets of rows that share a band.

Of two sets with Jaccard similarity s a minimum under a random permutation is the same with probability s (Broder,
"On the resemblance and containment of documents", 1997). With b bands of r minima each, the two agree in a whole
band with probability ``1 - (1 - s^r)^b`` (Leskovec, Rajaraman and Ullman, "Mining of Massive Datasets", ch. 3.4).
A single bit of a minimum agrees with probability (1 + s) / 2 (Li and König, "b-bit minwise hashing", WWW 2010), so
that 64 of them rule out most pairs that agree in a band by chance before any text is read.

Rows are clustered by union-find, and all pairs of a dense bucket's rows are compared.
"""

import math
from collections.abc import Sequence
from functools import lru_cache
from struct import Struct
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from posttrain.data.arrays import Indices
from posttrain.data.duplicates.shingles import Shingles, ngram_sequences, splitmix64

PERMUTATIONS = 128

_MISS_RATE = 0.001  # of pairs just at the threshold
_MISS_SHARE_OF_BANDS = 0.95  # of the misses; the comparison of bits may cause the rest
_BITS = 64  # one word, which a single instruction counts
_CHARACTERS_A_PIECE = 1 << 22  # 32 MiB of hashes
_SETS_A_PIECE = 256
_PAIRS_OF_DENSE_BUCKET = 8_192  # from here on comparing all pairs at once is the faster way
_PAIRS_A_ROW = 1_000  # to read a text takes as long as to compare so many pairs


class Banding(NamedTuple):
    """Divides a signature into ``bands`` bands of ``rows`` minima each."""

    bands: int
    rows: int


@lru_cache
def banding(threshold: float, permutations: int = PERMUTATIONS) -> Banding:
    """Finds the banding that proposes the fewest pairs below the threshold, of those that miss 0.1 % of pairs at it.

    The number of rows is that with the smallest ``integral from 0 to threshold of 1 - (1 - s^r)^b ds``; the number
    of bands follows from it: the fewest with ``(1 - threshold^r)^b`` at most 0.00095. The rest, up to 0.001, is
    the share that :func:`required_matching_bits` may miss.

    Args:
        permutations: Bands times rows is at most this, unless one row a band needs more.

    Raises:
        ValueError: the threshold lies outside (0, 1].
    """
    if not 0 < threshold <= 1:
        raise ValueError(f"threshold must lie in (0, 1], not {threshold}")
    similarity = np.linspace(0, threshold, 201)
    best, smallest_area = Banding(1, 1), math.inf
    for rows in range(1, permutations + 1):
        bands = _bands_needed(threshold, rows)
        # At least one row a band is allowed, however many bands a low threshold needs.
        if rows > 1 and bands * rows > permutations:
            break  # more rows take more bands too
        area = float(np.mean(1 - (1 - similarity**rows) ** bands))
        if area < smallest_area:
            best, smallest_area = Banding(bands, rows), area
    return best


def _bands_needed(threshold: float, rows: int) -> int:
    together = threshold**rows
    # log1p keeps its digits where the bands hardly ever agree.
    return 1 if together == 1 else math.ceil(math.log(_MISS_RATE * _MISS_SHARE_OF_BANDS) / math.log1p(-together))


def required_matching_bits(threshold: float, bits: int = _BITS) -> int:
    """Returns the number of ``bits`` bits in which a pair at the threshold agrees, except for 0.005 % of such pairs.

    The greatest k with ``P(Binomial(bits, (1 + threshold) / 2) < k)`` at most that.
    """
    chance = (1 + threshold) / 2
    below = 0.0
    for k in range(bits + 1):
        below += math.comb(bits, k) * chance**k * (1 - chance) ** (bits - k)
        if below > _MISS_RATE * (1 - _MISS_SHARE_OF_BANDS):
            return k
    return bits


def minhash_sketch(texts: Sequence[str], threshold: float = 0.8, ngram: int = 5) -> pa.Table:
    """Sketches each text in one row; all columns are uint64: ``grams``, ``bits`` and ``band_0``, ``band_1`` ...

    Two texts share ``grams`` exactly when they have the same n-grams equally often; ``bits`` are the lowest bits
    of the first 64 minima; a band is a hash of its minima. A text's sketch depends on nothing but the text.

    Args:
        ngram: Characters a shingle.
    """
    shape = banding(threshold)
    names = ["grams", "bits", *(f"band_{band}" for band in range(shape.bands))]
    pieces = [np.empty((0, len(names)), dtype=np.uint64)]
    lengths = np.cumsum([len(text) for text in texts]) // _CHARACTERS_A_PIECE
    for piece in np.split(np.arange(len(texts)), np.flatnonzero(np.diff(lengths)) + 1):
        if len(piece):
            pieces.append(_sketch_piece(ngram_sequences(texts[piece[0] : piece[-1] + 1], ngram), shape))
    return pa.table(dict(zip(names, map(pa.array, np.concatenate(pieces).T.copy()), strict=True)))


@lru_cache(maxsize=1)
def cached_minhash_sketch(texts: tuple[str, ...], threshold: float, ngram: int) -> pa.Table:
    """Caches the last `minhash_sketch`, as steps that follow each other need the same one."""
    return minhash_sketch(texts, threshold, ngram)


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


def signatures(shingles: Shingles, permutations: int, seed: int = 0) -> npt.NDArray[np.uint32]:
    """Computes the minimum of every set under each permutation, uint32 [N, permutations]."""
    from rensa import RMinHash

    count, pack = len(shingles.offsets) - 1, Struct(f"{permutations}I").pack
    minima = np.empty((count, permutations), dtype=np.uint32)
    # rensa hands out Python numbers: few at a time stay in the processor's cache.
    for start in range(0, count, _SETS_A_PIECE):
        offsets = shingles.offsets[start : start + _SETS_A_PIECE + 1]
        values = shingles.values[offsets[0] : offsets[-1]]
        matrix = RMinHash.digest_matrix_from_flat_token_hashes(
            values, (offsets - offsets[0]).astype(np.uint64), permutations, seed
        )
        packed = b"".join([pack(*row) for row in matrix.to_rows()])
        minima[start : start + _SETS_A_PIECE] = np.frombuffer(packed, np.uint32).reshape(-1, permutations)
    return minima


def union(cluster: Indices, i: Indices, j: Indices) -> None:
    """Joins in place the clusters of ``i[p]`` and ``j[p]``.

    Args:
        cluster: int64 [N], of every member the smallest index of its cluster; so it is again afterwards.
    """
    while len(i):
        a, b = cluster[i], cluster[j]
        apart = a != b
        i, j, a, b = i[apart], j[apart], a[apart], b[apart]
        # The smaller index always wins, so the result does not depend on the order of the pairs.
        np.minimum.at(cluster, np.maximum(a, b), np.minimum(a, b))
        _flatten(cluster)


def _flatten(cluster: Indices) -> None:
    """Points every member at its root; each pass halves the paths."""
    above = cluster[cluster]
    while not np.array_equal(above, cluster):
        cluster[:] = above
        above = cluster[cluster]


class DenseBuckets(NamedTuple):
    """Groups rows all of whose pairs are compared.

    Attributes:
        rows: The rows of each group, int64.
        names: int32 [N] each, the group of every row or -1; a row is in one group of each array at most.
    """

    rows: Sequence[Indices]
    names: Sequence[npt.NDArray[np.int32]]

    @classmethod
    def from_bands(
        cls, bands: Sequence[npt.NDArray[np.uint64]], buckets: Sequence[Indices], cluster: Indices, old: int
    ) -> Self:
        """Finds dense buckets, and joins those that share rows if that is less work.

        Args:
            bands: uint64 [N] each, the key of every row.
            buckets: Rows for each band, those with one key one behind the other.
            old: Pairs of rows before this one are not to be compared.
        """
        dense = [_dense(keys, members, cluster, old) for keys, members in zip(bands, buckets, strict=True)]
        if not any(len(members) for members, _ in dense):
            return cls([], [])
        root = np.arange(len(cluster))
        for members, starts in dense:
            union(root, members, np.repeat(members[starts], np.diff(starts, append=len(members))))
        all_rows = np.unique(np.concatenate([members for members, _ in dense]))
        # Joining buckets reads each text once, but compares pairs that share no bucket.
        cost_joined = _pair_cost(root[all_rows], all_rows, cluster, old)
        cost_apart = np.zeros(len(cluster))
        for members, starts in dense:
            label = np.repeat(members[starts], np.diff(starts, append=len(members)))
            cost_apart += np.bincount(root, weights=_pair_cost(label, members, cluster, old), minlength=len(cluster))
        joining_pays = cost_joined <= cost_apart
        groups: list[Indices] = []
        names = []
        joined_rows = all_rows[joining_pays[root[all_rows]]]
        joined_rows = joined_rows[np.argsort(root[joined_rows], kind="stable")]
        names.append(_name_buckets(groups, joined_rows, root[joined_rows], len(cluster)))
        for members, starts in dense:
            label = np.repeat(members[starts], np.diff(starts, append=len(members)))
            separate = ~joining_pays[root[members]]
            if separate.any():
                names.append(_name_buckets(groups, members[separate], label[separate], len(cluster)))
        return cls(groups, names)

    def hold(self, i: Indices, j: Indices) -> npt.NDArray[np.bool_]:
        """Returns True where the rows ``i[p]`` and ``j[p]`` are in one group."""
        together = np.zeros(len(i), dtype=bool)
        for names in self.names:
            together |= (names[i] == names[j]) & (names[i] >= 0)
        return together

    def outside(self, keys: npt.NDArray[np.uint64], members: Indices) -> Indices:
        """Selects the members of the buckets that do not lie in one group as a whole."""
        if not self.names or not len(members):
            return members
        starts, sizes = equal_runs(keys[members])
        inside = np.zeros(len(starts), dtype=bool)
        for names in self.names:
            lowest, highest = (reduce.reduceat(names[members], starts) for reduce in (np.minimum, np.maximum))
            inside |= (lowest == highest) & (lowest >= 0)
        rest: Indices = members[~np.repeat(inside, sizes)]
        return rest


def equal_runs(*columns: npt.NDArray[Any]) -> tuple[Indices, Indices]:
    """Finds the starts and lengths of runs of equal values."""
    count = len(columns[0])
    new = np.zeros(count, dtype=bool)
    new[:1] = True
    for values in columns:
        new[1:] |= values[1:] != values[:-1]
    starts = np.flatnonzero(new)
    return starts, np.diff(starts, append=count)


def _dense(keys: npt.NDArray[np.uint64], members: Indices, cluster: Indices, old: int) -> tuple[Indices, Indices]:
    """Finds the members of a band's dense buckets, and the start of each bucket."""
    _, sizes = equal_runs(keys[members])
    # The number of all pairs bounds that of pairs across clusters: most buckets end here.
    members = members[np.repeat(sizes * (sizes - 1) // 2 >= _PAIRS_OF_DENSE_BUCKET, sizes)]
    starts, sizes = equal_runs(keys[members])
    label = np.repeat(np.arange(len(starts)), sizes)
    members = members[(_pairs_across_clusters(label, members, cluster, old) >= _PAIRS_OF_DENSE_BUCKET)[label]]
    return members, equal_runs(keys[members])[0]


def _pair_cost(label: Indices, rows: Indices, cluster: Indices, old: int) -> npt.NDArray[np.float64]:
    """Estimates the cost of comparing groups of rows, by label, in units of one pair: float64 [N]."""
    work = np.zeros(len(cluster))
    width = label.max(initial=-1) + 1
    work[:width] = np.bincount(label) * _PAIRS_A_ROW + _pairs_across_clusters(label, rows, cluster, old)
    return work


def _pairs_across_clusters(label: Indices, rows: Indices, cluster: Indices, old: int) -> Indices:
    """Counts the pairs of each label's rows that lie in two clusters and are not both old."""

    def pairs(group: Indices) -> Indices:
        every, before = np.bincount(group), np.bincount(group[rows < old], minlength=group.max(initial=-1) + 1)
        return np.asarray((every * (every - 1) - before * (before - 1)) // 2, dtype=np.int64)

    both = label * len(cluster) + cluster[rows]
    names, position = np.unique(both, return_inverse=True)
    within = np.zeros(label.max(initial=-1) + 1, dtype=np.int64)
    np.add.at(within, names // len(cluster), pairs(position))
    return pairs(label) - within


def _name_buckets(groups: list[Indices], rows: Indices, label: Indices, count: int) -> npt.NDArray[np.int32]:
    """Adds the rows of each label, which are adjacent, to the groups, and returns the group of every row."""
    names = np.full(count, -1, dtype=np.int32)
    starts, sizes = equal_runs(label)
    names[rows] = np.repeat(np.arange(len(groups), len(groups) + len(starts)), sizes)
    if len(starts):
        groups += np.split(rows, starts[1:])
    return names
