"""Exact Jaccard similarity of many texts: candidates by prefix filtering, then the true value.

Two sets with a Jaccard similarity of at least t share at least ``ceil(t * n)`` members, n being the size of
either. So when members are ordered by rising frequency, the first ``n - ceil(t * n) + 1`` of both must meet
(Chaudhuri, Ganti and Kaushik, "A primitive operator for similarity joins in data cleaning", ICDE 2006).
Unlike MinHash this misses nothing and draws nothing at random. The sets are sparse rows, and meetings are a
product of sparse matrices.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from posttrain.data.normalise import normal_text

Indices = npt.NDArray[np.int64]

_MEETINGS_A_BLOCK = 4_000_000
_PAIRS_A_CHUNK = 50_000
_ROUNDING = 1e-9


def comparable(text: str) -> str:
    """The form in which texts are compared: normalised and case-folded."""
    return normal_text(text).casefold()


def shingles(text: str, ngram: int) -> set[str]:
    """The runs of ``ngram`` characters in ``text``; a shorter text is one shingle."""
    return {text[start : start + ngram] for start in range(max(1, len(text) - ngram + 1))}


def shingle_rows(texts: Sequence[str], ngram: int) -> Any:
    """Sparse 0/1 matrix int32 [N, V]: one row a text, one column a shingle, rarest shingles first."""
    from scipy.sparse import csr_array

    numbers: dict[str, int] = {}
    members: list[int] = []
    starts = [0]
    for text in texts:
        members += [numbers.setdefault(shingle, len(numbers)) for shingle in sorted(shingles(comparable(text), ngram))]
        starts.append(len(members))
    columns = np.array(members, dtype=np.int64)
    frequency = np.bincount(columns, minlength=len(numbers))
    rank = np.empty(len(numbers), dtype=np.int64)
    rank[np.argsort(frequency, kind="stable")] = np.arange(len(numbers))
    ones = np.ones(len(members), dtype=np.int32)
    rows = csr_array((ones, rank[columns], np.array(starts)), shape=(len(texts), len(numbers)))
    rows.sort_indices()
    return rows


def candidates(left: Any, right: Any, threshold: float) -> Iterator[tuple[Indices, Indices]]:
    """Blocks of row pairs (i of ``left``, j of ``right``) that hold all that are similar by ``threshold``.

    Args:
        left, right: rows of one matrix made by :func:`shingle_rows`.
    """
    begin_left, begin_right = _prefixes(left, threshold), _prefixes(right, threshold)
    sizes_left, sizes_right = np.diff(left.indptr), np.diff(right.indptr)
    rest_left = sizes_left - np.diff(begin_left.indptr)
    rest_right = sizes_right - np.diff(begin_right.indptr)
    last_left = begin_left.indices[begin_left.indptr[1:] - 1]
    last_right = begin_right.indices[begin_right.indptr[1:] - 1]
    holders = begin_right.T.tocsr()
    work = np.cumsum(begin_left @ np.diff(holders.indptr).astype(np.int64)) // _MEETINGS_A_BLOCK
    for block in np.split(np.arange(left.shape[0]), np.flatnonzero(np.diff(work)) + 1):
        meetings = (begin_left[block] @ holders).tocoo()
        i, j = block[meetings.row], meetings.col.astype(np.int64)
        # What both share up to the earlier end of the two prefixes has met; the rest lies behind that end.
        behind = np.where(last_left[i] <= last_right[j], rest_left[i], rest_right[j])
        needed = threshold / (1 + threshold) * (sizes_left[i] + sizes_right[j])
        possible = meetings.data + behind >= needed - _ROUNDING
        yield i[possible], j[possible]


def jaccard(left: Any, right: Any, i: Indices, j: Indices) -> npt.NDArray[np.float64]:
    """Similarity float64 [P] of the pairs (row ``i[p]`` of ``left``, row ``j[p]`` of ``right``)."""
    sizes_left, sizes_right = np.diff(left.indptr), np.diff(right.indptr)
    shared = np.zeros(len(i), dtype=np.int64)
    for start in range(0, len(i), _PAIRS_A_CHUNK):
        chunk = slice(start, start + _PAIRS_A_CHUNK)
        shared[chunk] = left[i[chunk]].multiply(right[j[chunk]]).sum(axis=1)
    return np.asarray(shared / (sizes_left[i] + sizes_right[j] - shared), dtype=np.float64)


def _prefixes(rows: Any, threshold: float) -> Any:
    """Of every row as many of its rarest members as must meet those of a similar row."""
    from scipy.sparse import csr_array

    sizes = np.diff(rows.indptr)
    lengths = sizes - np.ceil(threshold * sizes - _ROUNDING).astype(np.int64) + 1
    position = np.arange(rows.nnz) - np.repeat(rows.indptr[:-1], sizes)
    inside = position < np.repeat(lengths, sizes)
    starts = np.concatenate([[0], np.cumsum(np.minimum(lengths, sizes))])
    return csr_array((rows.data[inside], rows.indices[inside], starts), shape=rows.shape)
