"""Clusters vectors by cosine similarity."""

import hashlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from posttrain.data.arrays import Indices, Matrix
from posttrain.data.similarity.near_duplicates import union

Vectors = npt.NDArray[np.floating[Any]]

_ROWS_A_BLOCK = 1024
_PRODUCTS_A_BLOCK = 1 << 24  # 64 MiB of float32
_PAIRS_A_CHUNK = 1 << 16
_ROUNDING = 1e-4  # a float32 product is no further from the true cosine
_ROWS_A_CELL = 512
_SAMPLE_A_CELL = 64
_PASSES = 10  # of k-means; cells only have to be small, not optimal


def cosine_clusters(embeddings: Vectors, threshold: float, exact_rows: int = 100_000, seed: int = 0) -> Indices:
    """Clusters rows: int64 [N], each cluster named by its smallest row.

    Rows whose cosine, in float64, is at least ``threshold`` are joined; clusters are the connected components. A row of
    zeros is similar to nothing.

    Args:
        embeddings: [N, D] of any length.
        exact_rows: Largest number of distinct rows of which all pairs are compared; of more rows only those that share
            one of their two nearest cells.
        seed: Draws the first centres of the cells.
    """
    cluster = np.arange(len(embeddings), dtype=np.int64)
    if not embeddings.size:
        return cluster
    rows = _distinct_rows(embeddings, cluster)
    for i, j in _candidate_pairs(embeddings, rows, threshold - _ROUNDING, exact_rows, seed):
        apart = cluster[i] != cluster[j]
        i, j = i[apart], j[apart]
        # Blocks are filtered in float32 with a margin; only float64 decides, so that the block size changes nothing.
        alike = cosines(embeddings, i, j) >= threshold
        union(cluster, i[alike], j[alike])
    return cluster


def cosines(embeddings: Vectors, i: Indices, j: Indices) -> npt.NDArray[np.float64]:
    """Computes the cosine of the rows ``i[p]`` and ``j[p]``, none of zeros: float64 [P]."""
    result = np.empty(len(i))
    for start in range(0, len(i), _PAIRS_A_CHUNK):
        chunk = slice(start, start + _PAIRS_A_CHUNK)
        # Chunks bound the memory: every pair copies two vectors in float64.
        a, b = embeddings[i[chunk]].astype(np.float64), embeddings[j[chunk]].astype(np.float64)
        lengths = np.einsum("pd,pd->p", a, a) * np.einsum("pd,pd->p", b, b)
        result[chunk] = np.einsum("pd,pd->p", a, b) / np.sqrt(lengths)
    return result


def _distinct_rows(embeddings: Vectors, cluster: Indices) -> Indices:
    """Finds the distinct rows, in order; joins equal ones and skips rows of zeros."""
    first: dict[bytes, int] = {}
    real = np.flatnonzero([row.any() for row in embeddings])
    same = [
        first.setdefault(hashlib.blake2b(embeddings[row].tobytes(), digest_size=16).digest(), row)
        for row in real.tolist()
    ]
    union(cluster, real, np.array(same, dtype=np.int64))
    return np.array(list(first.values()), dtype=np.int64)


def _candidate_pairs(
    embeddings: Vectors, rows: Indices, least: float, exact_rows: int, seed: int
) -> Iterator[tuple[Indices, Indices]]:
    """Yields pairs of ``rows`` with a product of at least ``least``, block by block."""
    if len(rows) <= exact_rows:
        yield from _pairs(embeddings, rows, least)
        return
    # Two cells a row: neighbours across a border share at least one.
    cells = _nearest_centres(embeddings, rows, _centres(embeddings, rows, seed), 2)
    order = np.argsort(cells.reshape(-1), kind="stable")
    borders = np.flatnonzero(np.diff(cells.reshape(-1)[order])) + 1
    for members in np.split(rows[order // cells.shape[1]], borders):
        yield from _pairs(embeddings, members, least)


def _pairs(embeddings: Vectors, rows: Indices, least: float) -> Iterator[tuple[Indices, Indices]]:
    vectors = _unit_vectors(embeddings[rows])
    size = max(1, min(_ROWS_A_BLOCK, _PRODUCTS_A_BLOCK // max(len(rows), 1)))
    for start in range(0, len(rows), size):
        # Only with rows from this block on: earlier blocks have compared their rows with these.
        i, j = np.nonzero(vectors[start : start + size] @ vectors[start:].T >= least)
        yield rows[start + i], rows[start + j]


def _unit_vectors(embeddings: Vectors) -> Matrix:
    vectors = embeddings.astype(np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    return vectors


def _centres(embeddings: Vectors, rows: Indices, seed: int) -> Matrix:
    """Centres [K, D] of spherical k-means (Dhillon and Modha, Machine Learning, 2001) on a sample."""
    count = max(2, len(rows) // _ROWS_A_CELL)
    draw = np.random.default_rng(seed)
    # A sorted sample reads the embeddings in order.
    sample = np.sort(draw.choice(rows, min(len(rows), count * _SAMPLE_A_CELL), replace=False))
    centres = _unit_vectors(embeddings[np.sort(draw.choice(sample, count, replace=False))])
    for _ in range(_PASSES):
        cell = _nearest_centres(embeddings, sample, centres, 1)[:, 0]
        # Sums of many float32 vectors lose digits.
        sums = np.zeros(centres.shape, dtype=np.float64)
        np.add.at(sums, cell, _unit_vectors(embeddings[sample]))
        lengths = np.linalg.norm(sums, axis=1, keepdims=True)
        # A cell that lost all its members stays where it was.
        centres = np.where(lengths > 0, sums / np.maximum(lengths, 1e-12), centres).astype(np.float32)
    return centres


def _nearest_centres(embeddings: Vectors, rows: Indices, centres: Matrix, count: int) -> Indices:
    """Finds the ``count`` centres with the largest cosine to each row, int64 [N, count]."""
    result = np.empty((len(rows), count), dtype=np.int64)
    size = max(1, _PRODUCTS_A_BLOCK // len(centres))
    for start in range(0, len(rows), size):
        products = _unit_vectors(embeddings[rows[start : start + size]]) @ centres.T
        result[start : start + size] = np.argpartition(-products, count - 1, axis=1)[:, :count]
    return result
