"""The most typical row of each cluster that has no label, for a start without labels."""

import numpy as np
import numpy.typing as npt

from posttrain.select.selectors.closeness import Euclidean, Floats, Rows
from posttrain.select.selectors.facility import sample
from posttrain.select.selectors.k_means import k_means
from posttrain.select.selectors.pool import Pool
from posttrain.select.selectors.whitening import DIMENSIONS

_MOST_CLUSTERS = 500
_NEIGHBOURS = 20
_SMALL = 5
_REFERENCE = 4096


def typiclust(pool: Pool, n: int, seed: int, dimensions: int | None = DIMENSIONS) -> Rows:
    """Typical rows of the largest clusters with the fewest labels: G. Hacohen, A. Dekel and D. Weinshall, ICML 2022.

    There are as many clusters as rows will have a label, at most 500. A row is typical if its 20 nearest neighbours in
    the cluster are near. Clusters of fewer than five rows come last.

    Args:
        dimensions: principal components that are kept; None for the embeddings as they are.
    """
    points = pool.points("typiclust", dimensions)
    everything = np.arange(len(pool))
    count = min(_MOST_CLUSTERS, len(pool.chosen) + n, len(pool))
    cluster = k_means(points, everything, count, seed).cluster
    typical = typicality(points, cluster, np.random.default_rng(seed))
    labels = np.bincount(cluster[pool.chosen], minlength=count)
    sizes = np.bincount(cluster, minlength=count)
    free = pool.free
    order = free[np.lexsort((free, -typical[free], cluster[free]))]
    starts = np.searchsorted(cluster[order], np.arange(count))
    turn = np.arange(len(order)) - starts[cluster[order]] + labels[cluster[order]]
    found: Rows = order[np.lexsort((cluster[order], -sizes[cluster[order]], turn, sizes[cluster[order]] < _SMALL))]
    return found[:n]


def typicality(points: Floats, cluster: Rows, generator: np.random.Generator) -> npt.NDArray[np.float64]:
    """One over the mean distance to the 20 nearest rows of the same cluster, equation 1 there; [N].

    Neighbours are looked for among at most 4,096 rows of a cluster.
    """
    found = np.zeros(len(points))
    order = np.argsort(cluster, kind="stable")
    for rows in np.split(order, np.flatnonzero(np.diff(cluster[order])) + 1):
        if len(rows) < 2:
            continue
        others = sample(rows, _REFERENCE, generator)
        near = min(_NEIGHBOURS, len(others) - 1)
        closeness = Euclidean.between_rows_of(points[others])
        for start in range(0, len(rows), _REFERENCE):
            some = rows[start : start + _REFERENCE]
            both = Euclidean.between_rows_of(np.concatenate([closeness.points, points[some]]))
            distances = np.sqrt(-2 * both.between(slice(len(others), None), slice(len(others))))
            distances[some[:, None] == others] = np.inf
            nearest = np.partition(distances, near - 1, axis=1)[:, :near]
            found[some] = 1 / np.maximum(nearest.mean(axis=1, dtype=np.float64), 1e-12)
    return found
