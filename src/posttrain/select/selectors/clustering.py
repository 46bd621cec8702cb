"""Selectors that cluster the pool by k-means: diverse, uncertain_diverse and TypiClust."""

import numpy as np
import numpy.typing as npt

from posttrain.select.selectors.k_means import k_means
from posttrain.select.selectors.pool import Pool, sample_rows
from posttrain.select.selectors.similarity import DIMENSIONS, Euclidean, Floats, Rows, Weights

# TypiClust's own: most clusters, neighbours of the typicality, and rows below which a cluster is an outlier.
_MAX_CLUSTERS = 500
_NEIGHBOURS = 20
_MIN_CLUSTER_SIZE = 5

_MAX_REFERENCE = 4096  # rows that neighbours are sought among: distances in a cluster are quadratic


def diverse(pool: Pool, n: int, seed: int, dimensions: int | None = DIMENSIONS) -> Rows:
    """Chooses the rows nearest to the centres of ``n`` clusters of the pool, whatever the model predicts of them.

    Args:
        dimensions: number of principal components; None for the embeddings as they are.
    """
    return nearest_to_centres(pool.whitened_embeddings(dimensions), n, seed, pool.unlabelled_rows)


def uncertain_diverse(
    pool: Pool, n: int, seed: int, pool_factor: int = 6, by: str = "entropy", dimensions: int | None = DIMENSIONS
) -> Rows:
    """Chooses rows that cover the uncertain part of the pool.

    The ``pool_factor * n`` most uncertain rows are clustered with their uncertainty as weight, and the row nearest to
    each centre is taken (F. Zhdanov, Diverse mini-batch Active Learning, arXiv:1901.05954, 2019).

    Args:
        pool_factor: clustered rows for each row to choose. 6 was the best of a few in one run on Banking77 (a linear
            model, 60 to 64%): a choice, not a finding.
        by: ``entropy``, ``least_confidence`` or ``margin``.
        dimensions: number of principal components; None for the embeddings as they are.
    """
    pool.check_counts(pool_factor=pool_factor)
    points = pool.whitened_embeddings(dimensions)
    uncertainty = pool.uncertainty(by)
    # Uncertainty alone fills a batch with near-duplicates of one hard question; diversity alone takes what the model
    # knows already.
    candidates = pool.top(uncertainty, pool_factor * n)
    # A margin is negated, from -1 to 0; weights must not be negative.
    pull = np.nan_to_num(np.maximum(uncertainty[candidates] + (1.0 if by == "margin" else 0.0), 0.0))
    return nearest_to_centres(points, n, seed, candidates, pull)


def typiclust(pool: Pool, n: int, seed: int, dimensions: int | None = DIMENSIONS) -> Rows:
    """Chooses typical rows of the largest clusters with the fewest labels: G. Hacohen et al., ICML 2022.

    There are as many clusters as rows will have a label, at most 500. A row is typical if its 20 nearest neighbours in
    the cluster are near. Clusters of fewer than five rows come last.

    Args:
        dimensions: number of principal components; None for the embeddings as they are.
    """
    points = pool.whitened_embeddings(dimensions)
    everything = np.arange(len(pool))
    count = min(_MAX_CLUSTERS, len(pool.labelled_rows) + n, len(pool))
    cluster = k_means(points, everything, count, seed).cluster
    typical = typicality(points, cluster, np.random.default_rng(seed))
    labels = np.bincount(cluster[pool.labelled_rows], minlength=count)
    sizes = np.bincount(cluster, minlength=count)
    rows = pool.unlabelled_rows
    order = rows[np.lexsort((rows, -typical[rows], cluster[rows]))]
    starts = np.searchsorted(cluster[order], np.arange(count))
    # A row's rank in its cluster counts the cluster's labels: clusters with fewer labels come first.
    rank = np.arange(len(order)) - starts[cluster[order]] + labels[cluster[order]]
    chosen: Rows = order[
        np.lexsort((cluster[order], -sizes[cluster[order]], rank, sizes[cluster[order]] < _MIN_CLUSTER_SIZE))
    ]
    return chosen[:n]


def typicality(points: Floats, cluster: Rows, generator: np.random.Generator) -> npt.NDArray[np.float64]:
    """Computes one over the mean distance to the 20 nearest rows of the same cluster, equation 1 there: [N].

    Neighbours are sought among at most 4,096 rows of a cluster.
    """
    values = np.zeros(len(points))
    order = np.argsort(cluster, kind="stable")
    for rows in np.split(order, np.flatnonzero(np.diff(cluster[order])) + 1):
        if len(rows) < 2:
            continue
        others = sample_rows(rows, _MAX_REFERENCE, generator)
        near = min(_NEIGHBOURS, len(others) - 1)
        euclidean = Euclidean.from_rows(points[others])
        for start in range(0, len(rows), _MAX_REFERENCE):
            block = rows[start : start + _MAX_REFERENCE]
            both = Euclidean.from_rows(np.concatenate([euclidean.points, points[block]]))
            distances = np.sqrt(-2 * both.between(slice(len(others), None), slice(len(others))))
            distances[block[:, None] == others] = np.inf  # a row is not a neighbour of itself
            nearest = np.partition(distances, near - 1, axis=1)[:, :near]
            values[block] = 1 / np.maximum(nearest.mean(axis=1, dtype=np.float64), 1e-12)
    return values


def nearest_to_centres(points: Floats, n: int, seed: int, rows: Rows, weights: Weights | None = None) -> Rows:
    """Clusters rows into ``n`` groups and takes from each the row nearest to its centre.

    Args:
        points: float32 [N, D].
        n: number of rows to take, at most that of the candidates.
        seed: seed of the first centres.
        rows: int64 [M], the candidates.
        weights: float64 [M], non-negative pull of each candidate on the centres; None for all alike.

    Returns:
        int64 [n] distinct rows: first the n nearest ones, the largest cluster's first. Where there are fewer different
        points than ``n``, second-nearest rows follow, then third-nearest, and so on.
    """
    pull = None if weights is None or not weights.any() else weights
    clusters = k_means(points, rows, n, seed, pull)
    chosen: Rows = rows[_rank_by_distance(clusters.cluster, clusters.distances, n)]
    return chosen


def _rank_by_distance(cluster: Rows, distance: npt.NDArray[np.floating], n: int) -> Rows:
    """Returns rows by rank within their cluster, nearest first, then by the cluster's size, large to small."""
    rank = np.empty(len(cluster), np.int64)
    by_distance = np.lexsort((np.arange(len(cluster)), distance, cluster))
    sizes = np.bincount(cluster)
    starts = np.concatenate([[0], np.cumsum(sizes)[:-1]])
    rank[by_distance] = np.arange(len(cluster)) - np.repeat(starts, sizes)
    return np.lexsort((cluster, -sizes[cluster], rank))[:n]
