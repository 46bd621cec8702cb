"""k-means for many rows and many centres: seeded by squared distance, on a sample where rows are many."""

from dataclasses import dataclass

import numpy as np

from posttrain.select.selectors.similarity import Euclidean, Floats, Rows, Weights, blocks

# Rows a centre of the sample, and of the first centres: more move the centres by less than their own sampling does.
_ROWS_A_CENTRE = 128
_ROWS_TO_START = 16
_MIN_START_ROWS = 4096
_ITERATIONS = 50
_TOLERANCE = 1e-3
_SINGLE_THREAD_ROWS = 2**15


@dataclass(frozen=True)
class Clusters:
    """Rows by their nearest centre.

    Attributes:
        centres: float32 [K, D].
        cluster: int64 [M].
        distances: float32 [M], the squared distance to it.
    """

    centres: Floats
    cluster: Rows
    distances: Floats


def k_means(points: Floats, rows: Rows, count: int, seed: int, weights: Weights | None = None) -> Clusters:
    """Clusters rows by Lloyd's algorithm (S. Lloyd, 1982) from the centres of greedy k-means++.

    Centres are fitted to at most 128 rows each, drawn by the seed, and start from at most 16 each, or 4,096. It ends
    when the sum of squared distances falls by less than 0.1%.

    Args:
        points: float32 [N, D].
        rows: int64 [M], the points to cluster.
        count: number of centres, at most M.
        seed: seed of the sample and of the first centres.
        weights: float64 [M], non-negative, how much each row counts; None for all alike.
    """
    from threadpoolctl import threadpool_limits

    sampled = np.random.default_rng(seed).permutation(len(rows))[: count * _ROWS_A_CENTRE]
    sample = points[rows[sampled]]
    counts = np.ones(len(sample)) if weights is None else weights[sampled]
    # Fewer rows with a weight than centres: the others must be drawn, too.
    if np.count_nonzero(counts) < count:
        counts = np.maximum(counts, np.finfo(np.float32).tiny)
    # The same bits on any number of cores, except where one thread would take too long.
    with threadpool_limits(limits=1 if len(rows) < _SINGLE_THREAD_ROWS else None):
        few = slice(max(count * _ROWS_TO_START, _MIN_START_ROWS))
        centres = _lloyd(sample, counts, _first_centres(sample[few], count, counts[few], seed))
        return _assign(points, rows, centres)


def _lloyd(sample: Floats, weights: Weights, centres: Floats) -> Floats:
    """Moves each centre to the mean of its rows until the distances hardly fall."""
    before = np.inf
    for _ in range(_ITERATIONS):
        clusters = _assign(sample, np.arange(len(sample)), centres)
        total = float(clusters.distances @ weights)
        if total >= before * (1 - _TOLERANCE):
            break
        before = total
        centres = _means(sample, weights, clusters)
    return centres


def _first_centres(points: Floats, count: int, weights: Weights, seed: int) -> Floats:
    """Draws rows by squared distance, each the best of a few draws: greedy k-means++, as scikit-learn has it."""
    # scikit-learn's own makes float64 of all rows for every centre: 14 seconds for 1,000 centres, where this takes 3.
    generator = np.random.default_rng(seed)
    tries = 2 + int(np.log(count))
    euclidean = Euclidean.from_rows(points)
    everything = slice(None)
    chosen: list[int] = []
    squares = np.ones(len(points))
    for _ in range(count):
        odds = np.cumsum(weights * squares)
        candidates = np.searchsorted(odds, generator.random(tries) * odds[-1], side="right")
        candidates = np.minimum(candidates, np.flatnonzero(weights)[-1])
        distances = -2 * euclidean.between(everything, candidates).astype(np.float64)
        if chosen:
            np.minimum(distances, squares[:, None], out=distances)
        best = int(np.argmin(weights @ distances))
        squares = distances[:, best]
        chosen.append(int(candidates[best]))
    return points[chosen]


def _assign(points: Floats, rows: Rows, centres: Floats) -> Clusters:
    cluster = np.empty(len(rows), np.int64)
    distances = np.empty(len(rows), np.float32)
    halves = np.einsum("kd,kd->k", centres, centres) / 2
    transposed = np.ascontiguousarray(centres.T)
    for part in blocks(len(rows)):
        block = points[rows[part]]
        # |x - c|^2 / 2 without |x|^2 / 2, which is the same for all centres.
        similarity = block @ transposed
        similarity -= halves
        cluster[part] = nearest = similarity.argmax(axis=1)
        lengths = np.einsum("nd,nd->n", block, block)
        distances[part] = lengths - 2 * similarity[np.arange(len(nearest)), nearest]
    return Clusters(centres, cluster, np.maximum(distances, 0, out=distances))


def _means(points: Floats, weights: Weights, clusters: Clusters) -> Floats:
    """Returns the weighted mean of each cluster; for an empty one, a row farthest from its centre."""
    # By a sparse product: `np.add.at` takes many times as long, and a dense one-hot matrix is M by K.
    from scipy.sparse import csc_array

    count = len(clusters.centres)
    totals = np.bincount(clusters.cluster, weights, minlength=count)
    members = csc_array(
        (weights.astype(np.float32), clusters.cluster, np.arange(len(points) + 1)), (count, len(points))
    )
    sums: Floats = members @ points
    centres: Floats = np.divide(sums, totals[:, None], out=np.zeros_like(sums), where=totals[:, None] > 0)
    empty = np.flatnonzero(totals == 0)
    centres[empty] = points[np.argsort(-clusters.distances * (weights > 0), kind="stable")[: len(empty)]]
    return centres
