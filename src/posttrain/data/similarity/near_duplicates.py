"""Clusters near-duplicate texts: MinHash proposes pairs, and their exact Jaccard similarity decides.

Rows that agree in a band are a bucket. A row is compared with earlier rows only: of the first 64 of each of its buckets
with the 16 that agree with it in the most bits and bands. So the work grows with the number of rows and not with its
square, however many texts are almost alike, and the pairs among older rows stay the same as a set grows. Rows of pairs
that hold are clustered by union-find.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from posttrain.data.arrays import Hashes, Indices, Mask
from posttrain.data.similarity.hash_index import HashIndex
from posttrain.data.similarity.minhash import NGRAM, Sketches, minhash_sketch, required_matching_bits
from posttrain.data.similarity.ngrams import jaccard, ngram_sets

Fetch = Callable[[Indices], Sequence[str]]

Map = Callable[..., Iterator[Any]]

_FIRST_ROWS = 64  # of a bucket; two alike texts among more usually share another bucket alone

_MOST_COMPARED = 16  # earlier rows for each row

_ROWS_A_BLOCK = 1 << 14  # whose pairs are listed at a time: at most 150 MiB at a threshold of 0.8

_PAIRS_A_BLOCK = 20_000  # their texts are held in memory

_PAIRS_AN_ITEM = 1_000  # of one process; their texts are pickled


def near_duplicates(texts: Sequence[str], threshold: float = 0.8) -> npt.NDArray[np.int64]:
    """Clusters near-duplicate texts: int64 [N], each cluster named by the smallest index in it.

    Texts are case-folded, their whitespace is folded, and each becomes its set of runs of 5 characters. Pairs whose
    Jaccard similarity is at least ``threshold`` are joined; clusters are the connected components. MinHash
    (`posttrain.data.similarity.minhash`) proposes pairs, each of which is verified exactly; it misses one in a thousand
    of those that are just at the threshold, and fewer above it.

    Raises:
        TypeError: ``texts`` is one text, or holds something else than texts.
        ValueError: the threshold lies outside (0, 1].
    """
    if isinstance(texts, str):
        raise TypeError("texts must be a list of texts, not one text")
    for row, text in enumerate(texts):
        if not isinstance(text, str):
            raise TypeError(f"texts must be strings, but texts[{row}] is {type(text).__name__}")
    return cluster_near_duplicates(
        minhash_sketch(texts, threshold), lambda rows: [texts[row] for row in rows.tolist()], threshold
    )


def cluster_near_duplicates(
    sketches: pa.Table,
    texts: Fetch,
    threshold: float = 0.8,
    alive: Mask | None = None,
    alone: Mask | None = None,
    previous: Indices | None = None,
    over: Map = map,
) -> Indices:
    """Clusters N rows by near duplicates: int64 [N], each cluster named by its smallest row.

    Args:
        sketches: N rows made by `posttrain.data.similarity.minhash.minhash_sketch` with this threshold.
        texts: Returns the texts of rows.
        alive: bool [N]; other rows are clusters of their own. None: all.
        alone: bool [N], rows that are known to be similar to no other; they are not compared again. None: none.
        previous: int64 [K], the result of this function for the first K rows, which were then alive just as they are
            now. Only pairs with a later row are compared, and the result equals that of a search from scratch.
        over: ``map``, or a parallel equivalent.
    """
    grams, bits, bands = Sketches.from_table(sketches)
    old = 0 if previous is None else len(previous)
    cluster = np.arange(len(grams), dtype=np.int64)
    if previous is not None:
        cluster[:old] = previous
    rows = np.arange(len(grams)) if alive is None else np.flatnonzero(alive)
    _, first, inverse = np.unique(grams[rows], return_index=True, return_inverse=True)
    union(cluster, rows, rows[first][inverse])
    # Equal n-gram sets need no comparison: one row stands for all of them.
    distinct = np.sort(rows[first])
    buckets = [_buckets(keys, distinct, old) for keys in bands]
    for start in range(old, len(grams), _ROWS_A_BLOCK):
        i, j = _earlier_rows(bands, buckets, start, start + _ROWS_A_BLOCK)
        agreement = np.bitwise_count(~(bits[i] ^ bits[j])).astype(np.int64)
        possible = agreement >= required_matching_bits(threshold)
        if alone is not None:
            possible &= ~(alone[i] | alone[j])
        i, j, agreement = i[possible], j[possible], agreement[possible]
        for keys in bands:
            agreement += keys[i] == keys[j]
        _join_verified(*_most_promising(i, j, agreement), cluster, threshold, texts, over)
    return cluster


def _earlier_rows(
    bands: Sequence[Hashes], buckets: Sequence[Indices], start: int, stop: int
) -> tuple[Indices, Indices]:
    """Pairs the first rows of each bucket with later rows from ``start`` to before ``stop``."""
    codes = [np.empty(0, dtype=np.int64)]
    for keys, members in zip(bands, buckets, strict=True):
        starts, sizes = equal_runs(keys[members])
        later = np.flatnonzero((members >= start) & (members < stop))
        begin = np.repeat(starts, sizes)[later]
        for rank in range(_FIRST_ROWS):
            behind = later > begin + rank
            later, begin = later[behind], begin[behind]
            # One number per pair, so that one sort finds pairs of several bands.
            codes.append((members[later] << 32) + members[begin + rank])
    j, i = np.divmod(np.unique(np.concatenate(codes)), 1 << 32)
    return i, j


def _most_promising(i: Indices, j: Indices, agreement: Indices) -> tuple[Indices, Indices]:
    """Keeps the pairs of each later row that agree in the most bits and bands, best first."""
    order = np.lexsort((i, -agreement, j))
    i, j = i[order], j[order]
    starts, sizes = equal_runs(j)
    kept = np.arange(len(j)) - np.repeat(starts, sizes) < _MOST_COMPARED
    return i[kept], j[kept]


def _join_verified(i: Indices, j: Indices, cluster: Indices, threshold: float, texts: Fetch, over: Map) -> None:
    """Joins in place the clusters of pairs at or above the threshold; equal values of ``j`` follow each other."""
    while True:
        apart = cluster[i] != cluster[j]
        i, j = i[apart], j[apart]
        if not len(i):
            return
        # One pair a row at a time: where it holds, the row's other pairs often need no comparison.
        best, _ = equal_runs(j)
        alike = similarities(texts, i[best], j[best], over) >= threshold
        union(cluster, i[best][alike], j[best][alike])
        i, j = np.delete(i, best), np.delete(j, best)


def similarities(texts: Fetch, i: Indices, j: Indices, over: Map = map) -> npt.NDArray[np.float64]:
    """Computes the Jaccard similarity of the n-grams of rows ``i[p]`` and ``j[p]``, float64 [P].

    Arguments as in `cluster_near_duplicates`.
    """
    results = [np.empty(0)]
    for start in range(0, len(i), _PAIRS_A_BLOCK):
        block = slice(start, start + _PAIRS_A_BLOCK)
        rows, index = np.unique(np.concatenate([i[block], j[block]]), return_inverse=True)
        results += over(_compare, _items(texts(rows), *np.split(index, 2)))
    return np.concatenate(results)


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
        # Each pass halves the paths from the members to their roots.
        while not np.array_equal(above := cluster[cluster], cluster):
            cluster[:] = above


def equal_runs(values: npt.NDArray[Any]) -> tuple[Indices, Indices]:
    """Finds the starts and lengths of runs of equal values."""
    new = np.ones(len(values), dtype=bool)
    np.not_equal(values[1:], values[:-1], out=new[1:])
    starts = np.flatnonzero(new)
    return starts, np.diff(starts, append=len(values))


def _buckets(keys: Hashes, rows: Indices, old: int) -> Indices:
    """Finds rows that share their key with another, at least one of them new; by key, then by row."""
    before, fresh = rows[rows < old], rows[rows >= old]
    if len(before):
        before = before[HashIndex.from_hashes(keys[fresh], fresh).find(keys[before])[0]]
    rows = np.concatenate([before, fresh])
    # Sorting by the key alone comes first: most rows share it with no other.
    rows = rows[np.argsort(keys[rows])]
    _, sizes = equal_runs(keys[rows])
    rows = rows[np.repeat(sizes > 1, sizes)]
    return rows[np.lexsort((rows, keys[rows]))]


class _Item(NamedTuple):
    """Describes the work of one process: pairs among a few texts."""

    texts: Sequence[str]
    i: Indices
    j: Indices


def _items(texts: Sequence[str], i: Indices, j: Indices) -> Iterable[_Item]:
    for start in range(0, len(i), _PAIRS_AN_ITEM):
        part = slice(start, start + _PAIRS_AN_ITEM)
        rows, index = np.unique(np.concatenate([i[part], j[part]]), return_inverse=True)
        yield _Item([texts[row] for row in rows.tolist()], *np.split(index, 2))


def _compare(item: _Item) -> npt.NDArray[np.float64]:
    # Each text of an item is hashed once, however many of its pairs it is in.
    sets = ngram_sets(item.texts, NGRAM)
    return jaccard(sets, sets, item.i, item.j)
