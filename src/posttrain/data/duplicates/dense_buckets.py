"""Compares all pairs of dense buckets: of texts so alike that comparing candidates one by one would cost more.

For a symmetric difference it makes no difference if both sets are first compared with a third: for any set C,
``A ^ B = (A ^ C) ^ (B ^ C)``. With the n-grams that most texts hold for C, the differences ``a = A ^ C`` are small,
and ``|A ^ B| = |a| + |b| - 2 |a & b|`` gives the similarity of A and B. The ``|a & b|`` of all pairs are a matrix
product, of dense matrices for the n-grams that many differences hold, and of sparse ones for the others; those that
only one difference holds take no part. The numbers are whole and exact in float32 unless both differences have 2^24
members.

The work is quadratic: a few nanoseconds a pair if few others share what sets two texts apart, and up to half a
nanosecond for each n-gram in which they differ if many do. The memory does not grow with the number of texts.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from posttrain.data.duplicates.shingles import Hashes, Indices, ngram_sets, offsets_of
from posttrain.data.duplicates.union_find import union

Fetch = Callable[[Indices], Sequence[str]]

Map = Callable[..., Iterator[Any]]

Floats = npt.NDArray[np.float32]

_TEXTS_A_SAMPLE = 256

_TEXTS_A_FETCH = 8192

_CHARACTERS_AN_ITEM = 1 << 20

_MOST_ROWS = 1 << 15

_MOST_MEMBERS = 1 << 23

_ROWS_A_BLOCK = 256

_MOST_BITS = 24

_DENSE = 0.06  # of the rows; from there on the dense product is the faster one

_MOST_CELLS = 1 << 25

_SHRINK_BELOW = 0.75


_PAIRS_OF_DENSE_BUCKET = 8_192

_PAIRS_A_ROW = 1_000  # to read a text takes as long as to compare so many pairs


class _Differences(NamedTuple):
    """Holds the differences of R sets from a core.

    Attributes:
        owners: int32 [M], the text each member belongs to.
        members: uint64 [M], n-grams of the text outside the core and of the core outside the text.
        counts: int64 [R], members of each difference.
        sizes: int64 [R], n-grams of each text.
    """

    owners: npt.NDArray[np.int32]
    members: Hashes
    counts: Indices
    sizes: Indices


class _Frame(NamedTuple):
    """Holds R differences as rows of two matrices, whose columns are n-grams that at least two rows hold."""

    dense: Floats
    sparse: Any
    counts: Indices
    sizes: Indices

    @classmethod
    def of(cls, differences: _Differences) -> Self:
        from scipy.sparse import csr_array

        owners, members, counts, sizes = differences
        bins = (members >> np.uint64(64 - min(_MOST_BITS, len(members).bit_length() + 3))).astype(np.int64)
        # Counting hashes by leading bits drops most n-grams that only one difference holds, before the costly sort.
        often = np.bincount(bins)[bins] > 1 if len(bins) else np.zeros(0, dtype=bool)
        owners, members = owners[often], members[often]
        del bins, often  # as large as all else
        order = np.argsort(members)
        owners, members = owners[order], members[order]
        del order
        new = np.ones(len(members), dtype=bool)
        np.not_equal(members[1:], members[:-1], out=new[1:])
        starts = np.flatnonzero(new)
        held = np.diff(starts, append=len(members))
        shape = (len(held), len(sizes))
        ones = np.ones(len(owners), dtype=np.float32)
        columns = csr_array((ones, owners, np.append(starts, len(owners))), shape=shape)
        common = np.argsort(-held, kind="stable")[: _MOST_CELLS // max(1, len(sizes))]
        # Frequent n-grams go into the dense product, which is faster there than the sparse one.
        common = common[held[common] > _DENSE * len(sizes)]
        rare = held > 1
        rare[common] = False
        dense = np.ascontiguousarray(columns[common].toarray().T)
        return cls(dense, columns[np.flatnonzero(rare)].T.tocsr(), counts, sizes)


class _Partners(NamedTuple):
    """Holds the rows of a frame that others are compared with."""

    rows: Indices
    dense: Floats
    sparse: Any

    @classmethod
    def of(cls, frame: _Frame, rows: Indices) -> Self:
        dense = frame.dense if len(rows) == len(frame.dense) else frame.dense[rows]
        return cls(rows, dense.T, frame.sparse[rows].T.tocsr())


def all_pairs(
    rows: Indices, new: npt.NDArray[np.bool_], cluster: Indices, texts: Fetch, threshold: float, ngram: int, over: Map
) -> Iterator[tuple[Indices, Indices]]:
    """Yields blocks of pairs at or above the threshold, each at least once, as two arrays of rows.

    Args:
        rows: int64 [R], distinct.
        new: bool [R]; one of each pair is new.
        cluster: int64 [N], by row, and read again before every block; pairs within one cluster may be skipped.
        texts: returns the texts of rows.
        over: ``map``, or a parallel equivalent.
    """
    # Earlier comparisons may have joined all rows by now.
    if len(np.unique(cluster[rows])) < 2:
        return
    sample = rows[np.unique(np.linspace(0, len(rows) - 1, _TEXTS_A_SAMPLE).astype(np.int64))]
    core = _core(texts(sample), ngram)
    read = partial(_read_differences, texts=texts, core=core, ngram=ngram, over=over)
    usual = max(1, int(read(sample).counts.mean()))
    height = min(_MOST_ROWS, max(_ROWS_A_BLOCK, _MOST_MEMBERS // usual))
    height = -(-len(rows) // -(-len(rows) // height))  # blocks of equal size
    rows, fresh = np.concatenate([rows[new], rows[~new]]), int(new.sum())
    for top in range(0, fresh, height):
        left = rows[top : top + height]
        differences = read(left)
        for start in range(top, len(rows), height):
            right = rows[start : start + height]
            both = left if start == top else np.concatenate([left, right])
            if len(np.unique(cluster[both])) == 1:
                continue
            origin = np.arange(len(both)) < min(len(left), fresh - top)
            if start == top:
                frame, partner = _Frame.of(differences), np.ones(len(both), dtype=bool)
            else:
                frame, partner = _Frame.of(_concatenate([differences, read(right)])), np.arange(len(both)) >= len(left)
            for i, j in _pairs(frame, origin, partner, cluster, both, threshold):
                yield both[i], both[j]


def _pairs(
    frame: _Frame,
    origin: npt.NDArray[np.bool_],
    partner: npt.NDArray[np.bool_],
    cluster: Indices,
    rows: Indices,
    threshold: float,
) -> Iterator[tuple[Indices, Indices]]:
    """Yields pairs of an origin and a partner, as indices of ``rows``; compared rows stop being partners."""
    # A pair is alike when |a| + |b| - 2 shared <= share * (|A| + |B|), that is when shared >= bar[a] + bar[b].
    share = (1 - threshold) / (1 + threshold)
    bar = (frame.counts - share * frame.sizes) / 2
    # The float32 bar may round; candidates within the slack are decided in exact integers below.
    slack = 0.5 + 1e-6 * np.abs(bar).max()  # what passes is judged again without rounding
    bar = bar.astype(np.float32)
    partners = _Partners.of(frame, np.flatnonzero(partner))
    while True:
        _, label = np.unique(cluster[rows], return_inverse=True)
        own = np.bincount(label[partner], minlength=len(label))[label]
        open_ = np.flatnonzero(origin & (own < partner.sum()))
        if not len(open_):
            return
        # Rows of small clusters first: what they leave is often one cluster.
        block = open_[np.argsort(own[open_], kind="stable")[:_ROWS_A_BLOCK]]
        shared = _shared_members(frame, block, partners)
        alike = shared >= (bar[block] - np.float32(slack))[:, None] + bar[partners.rows]
        at = np.flatnonzero(alike)
        i, j, both = block[at // len(partners.rows)], partners.rows[at % len(partners.rows)], shared.ravel()[at]
        apart = label[i] != label[j]
        i, j, both = i[apart], j[apart], both[apart]
        total = frame.sizes[i] + frame.sizes[j]
        differ = frame.counts[i] + frame.counts[j] - 2 * both.astype(np.int64)
        held = (total - differ) // 2
        good = held / (total - held) >= threshold
        yield i[good], j[good]
        origin[block] = partner[block] = False
        if partner.sum() < _SHRINK_BELOW * len(partners.rows):
            partners = _Partners.of(frame, np.flatnonzero(partner))


def _shared_members(frame: _Frame, block: Indices, partners: _Partners) -> Floats:
    """Counts the members that the differences of a block and of its partners share, [B, P]."""
    shared: Floats = frame.dense[block] @ partners.dense
    if frame.sparse.nnz:
        shared += (frame.sparse[block] @ partners.sparse).toarray()
    return shared


def _core(texts: Sequence[str], ngram: int) -> Hashes:
    """The n-grams that more than half of the texts hold, sorted."""
    values, counts = np.unique(ngram_sets(texts, ngram).values, return_counts=True)
    core: Hashes = values[2 * counts > len(texts)]
    return core


def _read_differences(rows: Indices, texts: Fetch, core: Hashes, ngram: int, over: Map) -> _Differences:
    """Reads the rows' texts a few at a time, and computes their differences."""
    differences = []
    for start in range(0, len(rows), _TEXTS_A_FETCH):
        held = texts(rows[start : start + _TEXTS_A_FETCH])
        differences += list(over(partial(_differences, core=core, ngram=ngram), _items(held, len(core))))
    return _concatenate(differences)


def _concatenate(parts: Sequence[_Differences]) -> _Differences:
    """Concatenates differences."""
    starts = offsets_of(np.array([len(part.sizes) for part in parts], dtype=np.int64)).tolist()
    return _Differences(
        np.concatenate([part.owners + start for part, start in zip(parts, starts[:-1], strict=True)]),
        np.concatenate([part.members for part in parts]),
        np.concatenate([part.counts for part in parts]),
        np.concatenate([part.sizes for part in parts]),
    )


def _items(texts: Sequence[str], core: int) -> list[Sequence[str]]:
    """Cuts texts into work items for one process each, none of which takes much memory."""
    work = np.cumsum([max(len(text), core) for text in texts]) // _CHARACTERS_AN_ITEM
    borders = [0, *(np.flatnonzero(np.diff(work)) + 1).tolist(), len(texts)]
    return [texts[begin:end] for begin, end in pairwise(borders)]


def _differences(texts: Sequence[str], core: Hashes, ngram: int) -> _Differences:
    sets = ngram_sets(texts, ngram)
    sizes = sets.sizes
    owners = np.repeat(np.arange(len(sizes), dtype=np.int32), sizes)
    position = np.searchsorted(core, sets.values)
    inside = np.zeros(len(owners), dtype=bool)
    if len(core):
        inside = core[np.minimum(position, len(core) - 1)] == sets.values
    lacks = np.ones((len(sizes), len(core)), dtype=bool)
    lacks[owners[inside], position[inside]] = False
    lacking, missing = np.nonzero(lacks)
    owners = np.concatenate([owners[~inside], lacking.astype(np.int32)])
    members = np.concatenate([sets.values[~inside], core[missing]])
    return _Differences(owners, members, np.bincount(owners, minlength=len(sizes)), sizes)


class DenseBuckets(NamedTuple):
    """Groups rows all of whose pairs are compared.

    Attributes:
        rows: the rows of each group, int64.
        names: int32 [N] each, the group of every row or -1; a row is in one group of each array at most.
    """

    rows: Sequence[Indices]
    names: Sequence[npt.NDArray[np.int32]]

    @classmethod
    def of(
        cls, bands: Sequence[npt.NDArray[np.uint64]], buckets: Sequence[Indices], cluster: Indices, old: int
    ) -> Self:
        """Finds dense buckets, and joins those that share rows if that is less work.

        Args:
            bands: uint64 [N] each, the key of every row.
            buckets: for each band rows, those with one key one behind the other.
            old: pairs of rows before this one are not to be compared.
        """
        dense = [_dense(keys, members, cluster, old) for keys, members in zip(bands, buckets, strict=True)]
        if not any(len(members) for members, _ in dense):
            return cls([], [])
        root = np.arange(len(cluster))
        for members, starts in dense:
            union(root, members, np.repeat(members[starts], np.diff(starts, append=len(members))))
        everyone = np.unique(np.concatenate([members for members, _ in dense]))
        # Joining buckets reads each text once, but compares pairs that share no bucket.
        cost_joined = _pair_cost(root[everyone], everyone, cluster, old)
        cost_apart = np.zeros(len(cluster))
        for members, starts in dense:
            label = np.repeat(members[starts], np.diff(starts, append=len(members)))
            cost_apart += np.bincount(root, weights=_pair_cost(label, members, cluster, old), minlength=len(cluster))
        joined_label_wins = cost_joined <= cost_apart
        groups: list[Indices] = []
        names = []
        joined = everyone[joined_label_wins[root[everyone]]]
        joined = joined[np.argsort(root[joined], kind="stable")]
        names.append(_name_buckets(groups, joined, root[joined], len(cluster)))
        for members, starts in dense:
            label = np.repeat(members[starts], np.diff(starts, append=len(members)))
            separate = ~joined_label_wins[root[members]]
            if separate.any():
                names.append(_name_buckets(groups, members[separate], label[separate], len(cluster)))
        return cls(groups, names)

    def hold(self, i: Indices, j: Indices) -> npt.NDArray[np.bool_]:
        """True where the rows ``i[p]`` and ``j[p]`` are in one group."""
        held = np.zeros(len(i), dtype=bool)
        for names in self.names:
            held |= (names[i] == names[j]) & (names[i] >= 0)
        return held

    def outside(self, keys: npt.NDArray[np.uint64], members: Indices) -> Indices:
        """Members of the buckets that do not lie in one group as a whole."""
        if not self.names or not len(members):
            return members
        starts, sizes = equal_runs(keys[members])
        inside = np.zeros(len(starts), dtype=bool)
        for names in self.names:
            lowest, highest = (reduce.reduceat(names[members], starts) for reduce in (np.minimum, np.maximum))
            inside |= (lowest == highest) & (lowest >= 0)
        left: Indices = members[~np.repeat(inside, sizes)]
        return left


def equal_runs(*columns: npt.NDArray[Any]) -> tuple[Indices, Indices]:
    """Starts and lengths of runs of equal values."""
    count = len(columns[0])
    new = np.zeros(count, dtype=bool)
    new[:1] = True
    for values in columns:
        new[1:] |= values[1:] != values[:-1]
    starts = np.flatnonzero(new)
    return starts, np.diff(starts, append=count)


def _dense(keys: npt.NDArray[np.uint64], members: Indices, cluster: Indices, old: int) -> tuple[Indices, Indices]:
    """Members of a band's dense buckets, and where these begin."""
    _, sizes = equal_runs(keys[members])
    members = members[np.repeat(sizes * (sizes - 1) // 2 >= _PAIRS_OF_DENSE_BUCKET, sizes)]
    starts, sizes = equal_runs(keys[members])
    label = np.repeat(np.arange(len(starts)), sizes)
    members = members[(_pairs_across_clusters(label, members, cluster, old) >= _PAIRS_OF_DENSE_BUCKET)[label]]
    return members, equal_runs(keys[members])[0]


def _pair_cost(label: Indices, rows: Indices, cluster: Indices, old: int) -> npt.NDArray[np.float64]:
    """Cost of comparing groups of rows, by label, in units of one pair: float64 [N]."""
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
    """Adds the rows of each label, which stand together, to the groups, and says of every row in which it is."""
    names = np.full(count, -1, dtype=np.int32)
    starts, sizes = equal_runs(label)
    names[rows] = np.repeat(np.arange(len(groups), len(groups) + len(starts)), sizes)
    if len(starts):
        groups += np.split(rows, starts[1:])
    return names
