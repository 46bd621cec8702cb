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

from posttrain.data.arrays import Hashes, Indices, Matrix
from posttrain.data.duplicates.shingles import ngram_sets, offsets_of

Fetch = Callable[[Indices], Sequence[str]]

Map = Callable[..., Iterator[Any]]


_TEXTS_A_SAMPLE = 256  # from which the core is taken; a poor core costs time, and changes no result

_TEXTS_A_FETCH = 8192  # texts held in memory at a time

_CHARACTERS_AN_ITEM = 1 << 20  # 8 MiB of hashes in one process

_MOST_ROWS = 1 << 15

_MOST_MEMBERS = 1 << 23  # 64 MiB of hashes in one frame

_ROWS_A_BLOCK = 256

_MOST_BITS = 24

_DENSE = 0.06  # of the rows; from there on the dense product is the faster one

_MOST_CELLS = 1 << 25  # 128 MiB of the dense matrix, in float32

_SHRINK_BELOW = 0.75  # of the partners; copying the matrices more often costs more than it saves


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

    dense: Matrix
    sparse: Any
    counts: Indices
    sizes: Indices

    @classmethod
    def from_differences(cls, differences: _Differences) -> Self:
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
        frequency = np.diff(starts, append=len(members))
        shape = (len(frequency), len(sizes))
        ones = np.ones(len(owners), dtype=np.float32)
        columns = csr_array((ones, owners, np.append(starts, len(owners))), shape=shape)
        common = np.argsort(-frequency, kind="stable")[: _MOST_CELLS // max(1, len(sizes))]
        # Frequent n-grams go into the dense product, which is faster there than the sparse one.
        common = common[frequency[common] > _DENSE * len(sizes)]
        rare = frequency > 1
        rare[common] = False
        dense = np.ascontiguousarray(columns[common].toarray().T)
        return cls(dense, columns[np.flatnonzero(rare)].T.tocsr(), counts, sizes)


class _Partners(NamedTuple):
    """Holds the rows of a frame that others are compared with."""

    rows: Indices
    dense: Matrix
    sparse: Any

    @classmethod
    def from_frame(cls, frame: _Frame, rows: Indices) -> Self:
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
        texts: Returns the texts of rows.
        over: ``map``, or a parallel equivalent.
    """
    # Earlier comparisons may have joined all rows by now.
    if len(np.unique(cluster[rows])) < 2:
        return
    sample = rows[np.unique(np.linspace(0, len(rows) - 1, _TEXTS_A_SAMPLE).astype(np.int64))]
    core = _core(texts(sample), ngram)
    read_rows = partial(_read_differences, texts=texts, core=core, ngram=ngram, over=over)
    usual = max(1, int(read_rows(sample).counts.mean()))
    height = min(_MOST_ROWS, max(_ROWS_A_BLOCK, _MOST_MEMBERS // usual))
    height = -(-len(rows) // -(-len(rows) // height))  # blocks of equal size
    rows, fresh = np.concatenate([rows[new], rows[~new]]), int(new.sum())
    for top in range(0, fresh, height):
        left = rows[top : top + height]
        differences = read_rows(left)
        for start in range(top, len(rows), height):
            right = rows[start : start + height]
            both = left if start == top else np.concatenate([left, right])
            # Pairs of earlier blocks have joined them: whatever these texts say, the clusters stay.
            if len(np.unique(cluster[both])) == 1:
                continue
            origin = np.arange(len(both)) < min(len(left), fresh - top)
            if start == top:
                frame, partner = _Frame.from_differences(differences), np.ones(len(both), dtype=bool)
            else:
                frame, partner = (
                    _Frame.from_differences(_concatenate([differences, read_rows(right)])),
                    np.arange(len(both)) >= len(left),
                )
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
    # With I shared and U distinct n-grams |A ^ B| = U - I and |A| + |B| = U + I, so I / U >= t bounds their ratio.
    share = (1 - threshold) / (1 + threshold)
    bar = (frame.counts - share * frame.sizes) / 2
    # The float32 bar may round; candidates within the slack are decided in exact integers below.
    slack = 0.5 + 1e-6 * np.abs(bar).max()  # what passes is judged again without rounding
    bar = bar.astype(np.float32)
    partners = _Partners.from_frame(frame, np.flatnonzero(partner))
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
        shared_ngrams = (total - differ) // 2
        good = shared_ngrams / (total - shared_ngrams) >= threshold
        yield i[good], j[good]
        # These rows have been compared with all partners.
        origin[block] = partner[block] = False
        if partner.sum() < _SHRINK_BELOW * len(partners.rows):
            partners = _Partners.from_frame(frame, np.flatnonzero(partner))


def _shared_members(frame: _Frame, block: Indices, partners: _Partners) -> Matrix:
    """Counts the members that the differences of a block and of its partners share, [B, P]."""
    shared: Matrix = frame.dense[block] @ partners.dense
    if frame.sparse.nnz:
        shared += (frame.sparse[block] @ partners.sparse).toarray()
    return shared


def _core(texts: Sequence[str], ngram: int) -> Hashes:
    """Returns the n-grams that more than half of the texts hold, sorted."""
    values, counts = np.unique(ngram_sets(texts, ngram).values, return_counts=True)
    core: Hashes = values[2 * counts > len(texts)]
    return core


def _read_differences(rows: Indices, texts: Fetch, core: Hashes, ngram: int, over: Map) -> _Differences:
    """Reads the rows' texts a few at a time, and computes their differences."""
    differences = []
    for start in range(0, len(rows), _TEXTS_A_FETCH):
        batch = texts(rows[start : start + _TEXTS_A_FETCH])
        differences += list(over(partial(_differences, core=core, ngram=ngram), _items(batch, len(core))))
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
