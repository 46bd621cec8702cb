"""Clusters near-duplicate texts: MinHash proposes pairs, and their exact Jaccard similarity decides."""

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from posttrain.data.arrays import Indices
from posttrain.data.duplicates.all_pairs import Fetch, Map, all_pairs
from posttrain.data.duplicates.candidates import DenseBuckets, equal_runs, minhash_sketch, required_matching_bits, union
from posttrain.data.duplicates.shingles import jaccard, ngram_sets, offsets_of

_PAIRS_A_LIST = 1 << 22  # that are listed at a time: 32 MiB for each of their columns

_PAIRS_A_BLOCK = 20_000  # their texts are held in memory

_PAIRS_AN_ITEM = 1_000  # of one process; their texts are pickled

_LEADING_BITS = 20  # of a table of 1 MiB, which stays in the processor's cache

_MIN_FOREST_SHARE = 0.5  # the share of a forest that has to hold for another one to be tried

_ROWS_TO_WARN = 100_000  # all their pairs take a minute or more

log = logging.getLogger("posttrain")


def near_duplicates(texts: Sequence[str], threshold: float = 0.8, ngram: int = 5) -> npt.NDArray[np.int64]:
    """Clusters near-duplicate texts: int64 [N], each cluster named by the smallest index in it.

    Texts are case-folded, their whitespace is folded, and each becomes its set of ``ngram``-character runs:
    characters rather than words, because a message of ten words has too few word runs to survive one typo.
    Pairs whose Jaccard similarity is at least ``threshold`` are joined; clusters are the connected components.
    Pairs are found by MinHash (`posttrain.data.duplicates.candidates`), which misses one in a thousand of those that
    are just at the threshold and fewer above it, and are verified exactly.

    Raises:
        TypeError: ``texts`` is one text, or holds something that is none.
        ValueError: the threshold lies outside (0, 1], or ``ngram`` is below 1.
    """
    if isinstance(texts, str):
        raise TypeError("texts must be a list of texts, not one text")
    for row, text in enumerate(texts):
        if not isinstance(text, str):
            raise TypeError(f"texts must be strings, but texts[{row}] is {type(text).__name__}")
    return cluster_near_duplicates(
        minhash_sketch(texts, threshold, ngram),
        lambda rows: [texts[row] for row in rows.tolist()],
        threshold,
        ngram,
    )


class _Pairs(NamedTuple):
    i: Indices
    j: Indices


class _CompareItem(NamedTuple):
    """Describes the work of one process: pairs among a few texts."""

    texts: Sequence[str]
    i: Indices
    j: Indices


def cluster_near_duplicates(
    sketches: pa.Table,
    texts: Fetch,
    threshold: float = 0.8,
    ngram: int = 5,
    alive: npt.NDArray[np.bool_] | None = None,
    previous: Indices | None = None,
    over: Map = map,
) -> Indices:
    """Clusters N rows by near duplicates: int64 [N], each cluster named by its smallest row.

    Args:
        sketches: N rows made by `posttrain.data.duplicates.candidates.minhash_sketch` with this threshold and ngram.
        texts: Returns the texts of rows.
        alive: bool [N]; other rows are clusters of their own. None: all.
        previous: int64 [K], the result of this function for the first K rows with the same settings. Only pairs with a
            later row are compared, and the result equals that of a search from scratch.
        over: ``map``, or a parallel equivalent.
    """
    names = [name for name in sketches.column_names if name.startswith("band_")]
    old = 0 if previous is None else len(previous)
    cluster = np.arange(sketches.num_rows, dtype=np.int64)
    if previous is not None:
        cluster[:old] = previous
    rows = np.arange(len(cluster)) if alive is None else np.flatnonzero(alive)
    _, first, inverse = np.unique(_column(sketches, "grams")[rows], return_index=True, return_inverse=True)
    union(cluster, rows, rows[first][inverse])
    # Equal n-gram sets need no comparison: one row stands for all of them.
    distinct = np.sort(rows[first])
    bands = [_column(sketches, name) for name in names]
    search = _Search(bands, _column(sketches, "bits"), required_matching_bits(threshold), old)
    buckets = [_buckets(keys, distinct, old) for keys in bands]
    compare = partial(_similarities, texts=texts, ngram=ngram, over=over)
    # Stars first: n - 1 comparisons join a bucket of n similar texts, where all pairs would be n * (n - 1) / 2.
    failed_pairs = _join_verified(search.stars(buckets, cluster), cluster, compare, threshold, search)
    # Pairs that failed once are not compared again in later buckets.
    failed_codes = np.sort(failed_pairs.i * len(cluster) + failed_pairs.j)
    dense = DenseBuckets.from_bands(bands, buckets, cluster, old)
    for rows_of_bucket in dense.rows:
        if len(rows_of_bucket) >= _ROWS_TO_WARN:
            log.warning("%d texts are almost alike; comparing all of them takes a while", len(rows_of_bucket))
        for i, j in all_pairs(rows_of_bucket, rows_of_bucket >= old, cluster, texts, threshold, ngram, over):
            # All pairs of a dense bucket are compared, but only those that bands and bits propose count: which buckets
            # are dense must not change the result.
            candidate = search.candidate(i, j)
            union(cluster, i[candidate], j[candidate])
    buckets = [dense.outside(keys, members) for keys, members in zip(bands, buckets, strict=True)]
    for pairs in search.across(buckets, cluster):
        fresh = ~(np.isin(pairs.i * len(cluster) + pairs.j, failed_codes) | dense.hold(*pairs))
        _join_verified(_Pairs(pairs.i[fresh], pairs.j[fresh]), cluster, compare, threshold, search)
    return cluster


def similarities(texts: Fetch, i: Indices, j: Indices, ngram: int = 5, over: Map = map) -> npt.NDArray[np.float64]:
    """Computes the Jaccard similarity of the n-grams of rows ``i[p]`` and ``j[p]``, float64 [P].

    Arguments as in `cluster_near_duplicates`.
    """
    blocks = [
        _similarities(*block, texts=texts, ngram=ngram, over=over)
        for block in _blocks_of_pairs(_Pairs(i, j), _PAIRS_A_BLOCK)
    ]
    return np.concatenate([np.empty(0), *blocks])


class _Search(NamedTuple):
    """Lists candidate pairs, of which at least one row is at or behind ``old``."""

    bands: Sequence[npt.NDArray[np.uint64]]
    bits: npt.NDArray[np.uint64]
    needed: int
    old: int

    def candidate(self, i: Indices, j: Indices) -> npt.NDArray[np.bool_]:
        """Returns True for pairs that agree in a band and in enough bits."""
        good = np.zeros(len(i), dtype=bool)
        for keys in self.bands:
            good |= keys[i] == keys[j]
        good &= np.bitwise_count(~(self.bits[i] ^ self.bits[j])) >= self.needed
        return good

    def possible(self, band: int, cluster: Indices, i: Indices, j: Indices) -> npt.NDArray[np.bool_]:
        """Returns True for pairs of a bucket across two clusters that agree in enough bits, and in no earlier band."""
        good: npt.NDArray[np.bool_] = cluster[i] != cluster[j]
        good[good] = np.bitwise_count(~(self.bits[i[good]] ^ self.bits[j[good]])) >= self.needed
        for keys in self.bands[:band]:
            # A pair that agrees in an earlier band was proposed there.
            good[good] = keys[i[good]] != keys[j[good]]
        return good

    def stars(self, buckets: Sequence[Indices], cluster: Indices) -> _Pairs:
        """Pairs each bucket's rows with its smallest row, without pairs that join nothing if all others hold."""
        tentative = cluster.copy()
        pairs = []
        for band, members in enumerate(buckets):
            if not len(members):
                continue
            starts, sizes = equal_runs(self.bands[band][members])
            # Rows in a bucket are in order.
            i, j = np.repeat(members[starts], sizes), members
            # Pairs of two old rows were compared when the set was smaller.
            late = (i != j) & (j >= self.old)
            i, j = i[late], j[late]
            good = self.possible(band, tentative, i, j)
            pairs.append(_Pairs(i[good], j[good]))
            union(tentative, *pairs[-1])
        return _concatenate_pairs(pairs)

    def across(self, buckets: Sequence[Indices], cluster: Indices) -> Iterator[_Pairs]:
        """Yields all pairs from two different clusters, as these are when a block is requested."""
        blocks: list[_Pairs] = []
        for band, members in enumerate(buckets):
            for pairs in self._across(band, members, cluster):
                blocks.append(pairs)
                if sum(len(block.i) for block in blocks) > _PAIRS_A_BLOCK:
                    yield _concatenate_pairs(blocks)
                    blocks = []
        yield _concatenate_pairs(blocks)

    def _across(self, band: int, members: Indices, cluster: Indices) -> Iterator[_Pairs]:
        keys = self.bands[band][members]
        # New rows first, so that every pair to be listed runs from a new row to one behind its own cluster.
        order = np.lexsort((cluster[members], members < self.old, keys))
        members, keys = members[order], keys[order]
        starts, sizes = equal_runs(keys)
        bucket_end = np.repeat(starts + sizes, sizes)
        own, own_sizes = equal_runs(keys, cluster[members], members < self.old)
        own_end = np.repeat(own + own_sizes, own_sizes)
        counts = np.where(members >= self.old, bucket_end - own_end, 0)
        origins = np.flatnonzero(counts)
        pieces = np.cumsum(counts[origins]) // _PAIRS_A_LIST
        for piece in np.split(origins, np.flatnonzero(np.diff(pieces)) + 1):
            many = counts[piece]
            begins = offsets_of(many)
            partner = np.arange(begins[-1]) + np.repeat(own_end[piece] - begins[:-1], many)
            i, j = np.repeat(members[piece], many), members[partner]
            good = self.possible(band, cluster, i, j)
            i, j = i[good], j[good]
            yield _Pairs(np.minimum(i, j), np.maximum(i, j))

    def forest(self, pairs: _Pairs, cluster: Indices) -> npt.NDArray[np.bool_]:
        """Selects the pairs, with the most equal bits, that would join all the clusters that all pairs would."""
        from scipy.sparse import coo_array
        from scipy.sparse.csgraph import minimum_spanning_tree

        ends = np.concatenate(pairs)
        names, index = np.unique(np.concatenate([ends, cluster[ends]]), return_inverse=True)
        ends, roots = index.reshape(2, -1)
        i, j = ends.reshape(2, -1)
        # Rows of one cluster are connected already: these edges are shorter than all others.
        ties = np.unique((ends * len(names) + roots)[ends != roots])
        length = np.full(len(i) + len(ties), 0.5)
        # One more than the difference: a sparse matrix drops edges of length 0.
        length[: len(i)] = np.bitwise_count(self.bits[pairs.i] ^ self.bits[pairs.j]) + 1.0
        edges = np.concatenate([i, ties // len(names)]), np.concatenate([j, ties % len(names)])
        tree = minimum_spanning_tree(coo_array((length, edges), shape=(len(names),) * 2).tocsr()).tocoo()
        return np.isin(i * len(names) + j, tree.row.astype(np.int64) * len(names) + tree.col)


def _join_verified(
    pairs: _Pairs, cluster: Indices, compare: Callable[[Indices, Indices], Any], threshold: float, search: _Search
) -> _Pairs:
    """Joins in place the clusters of pairs at or above the threshold, and returns the pairs below it."""
    failures = [_Pairs(pairs.i[:0], pairs.j[:0])]

    def verify(block: _Pairs) -> float:
        apart = cluster[block.i] != cluster[block.j]
        i, j = block.i[apart], block.j[apart]
        alike = compare(i, j) >= threshold
        union(cluster, i[alike], j[alike])
        failures.append(_Pairs(i[~alike], j[~alike]))
        return float(alike.mean()) if len(i) else 0.0

    # A spanning forest settles most of a long list with few comparisons; it is not worth it once most of its pairs
    # fail.
    worthwhile = True
    while worthwhile and len(pairs.i) > _PAIRS_A_BLOCK:
        in_forest = search.forest(pairs, cluster)
        worthwhile = verify(_Pairs(pairs.i[in_forest], pairs.j[in_forest])) > _MIN_FOREST_SHARE
        unsettled = ~in_forest & (cluster[pairs.i] != cluster[pairs.j])
        pairs = _Pairs(pairs.i[unsettled], pairs.j[unsettled])
    for block in _blocks_of_pairs(pairs, _PAIRS_A_BLOCK):
        verify(block)
    return _concatenate_pairs(failures)


def _column(sketches: pa.Table, name: str) -> npt.NDArray[np.uint64]:
    return np.asarray(sketches[name].to_numpy(), dtype=np.uint64)


def _buckets(keys: npt.NDArray[np.uint64], rows: Indices, old: int) -> Indices:
    """Finds rows that share their key with another, at least one of them new; by key, then by row."""
    new = np.sort(keys[rows[rows >= old]])
    before = rows[rows < old]
    if len(before):
        before = before[_members_of(keys[before], new)]
    rows = np.concatenate([before, rows[rows >= old]])
    rows = rows[np.argsort(keys[rows])]
    _, sizes = equal_runs(keys[rows])
    rows = rows[np.repeat(sizes > 1, sizes)]
    return rows[np.lexsort((rows, keys[rows]))]


def _members_of(keys: npt.NDArray[np.uint64], targets: npt.NDArray[np.uint64]) -> Indices:
    """Finds the positions in ``keys`` of values of ``targets``, which is sorted."""
    table = np.zeros(1 << _LEADING_BITS, dtype=bool)
    # A table of leading bits rules most keys out before the binary search, which misses the cache.
    table[targets >> np.uint64(64 - _LEADING_BITS)] = True
    positions = np.flatnonzero(table[keys >> np.uint64(64 - _LEADING_BITS)])
    if not len(positions):
        return positions
    at = np.minimum(np.searchsorted(targets, keys[positions]), len(targets) - 1)
    members: Indices = positions[targets[at] == keys[positions]]
    return members


def _concatenate_pairs(blocks: Sequence[_Pairs]) -> _Pairs:
    """Concatenates pairs, sorted by row so that neighbours read the same texts."""
    empty = np.empty(0, np.int64)
    i = np.concatenate([empty, *(pairs.i for pairs in blocks)])
    j = np.concatenate([empty, *(pairs.j for pairs in blocks)])
    # Neighbouring pairs then share texts, of which each block reads every one once.
    order = np.lexsort((j, i))
    return _Pairs(i[order], j[order])


def _blocks_of_pairs(pairs: _Pairs, size: int) -> Iterator[_Pairs]:
    for start in range(0, len(pairs.i), size):
        yield _Pairs(pairs.i[start : start + size], pairs.j[start : start + size])


def _similarities(i: Indices, j: Indices, *, texts: Fetch, ngram: int, over: Map) -> npt.NDArray[np.float64]:
    """Computes the similarities of one block of pairs, whose texts are held in memory."""
    rows, index = np.unique(np.concatenate([i, j]), return_inverse=True)
    block = texts(rows) if len(rows) else []
    items = _items(block, _Pairs(index[: len(i)], index[len(i) :]))
    return np.concatenate([np.empty(0), *over(partial(_compare, ngram=ngram), items)])


def _items(texts: Sequence[str], pairs: _Pairs) -> Iterable[_CompareItem]:
    for part in _blocks_of_pairs(pairs, _PAIRS_AN_ITEM):
        rows, index = np.unique(np.concatenate(part), return_inverse=True)
        yield _CompareItem([texts[row] for row in rows.tolist()], index[: len(part.i)], index[len(part.i) :])


def _compare(item: _CompareItem, ngram: int) -> npt.NDArray[np.float64]:
    # Each text of an item is hashed once, however many of its pairs it is in.
    sets = ngram_sets(item.texts, ngram)
    return jaccard(sets, sets, item.i, item.j)
