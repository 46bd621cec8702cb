"""Rows that cover a pool: the row nearest to the centre of each cluster."""

import numpy as np
import numpy.typing as npt

from posttrain.select.selectors.closeness import Floats, Rows, blocks
from posttrain.select.selectors.k_means import k_means
from posttrain.select.selectors.seeding import Weights


def nearest_to_centres(
    points: Floats, n: int, seed: int, rows: Rows, weights: Weights | None = None, mini_batch: int | None = None
) -> Rows:
    """Cluster rows into ``n`` groups and take from each the row nearest to its centre.

    Rows are put in a canonical order first, so that the choice depends on the set of rows and not on their order (rows
    that are equal keep theirs).

    Args:
        points: float32 [N, D].
        n: rows to take, at most as many as there are candidates.
        seed: of the first centres.
        rows: int64 [M], the candidates.
        weights: float64 [M], non-negative pull of each candidate on the centres; None for all alike.
        mini_batch: see `posttrain.select.selectors.k_means.k_means`.

    Returns:
        int64 [n] distinct rows: first the n nearest ones, the largest cluster's first. Where there are fewer different
        points than ``n``, second-nearest rows follow, then third-nearest, and so on.
    """
    if n <= 0:
        return np.empty(0, np.int64)
    order = np.argsort(_hashes(points)[rows], kind="stable")
    rows = rows[order]
    pull = None if weights is None or not weights.any() else weights[order]
    found = k_means(points, rows, n, seed, pull, mini_batch)
    chosen: Rows = rows[_nearest_first(found.cluster, found.distances, n)]
    return chosen


def _nearest_first(cluster: Rows, distance: npt.NDArray[np.floating], n: int) -> Rows:
    """Rows by place within their cluster, nearest first, then by the cluster's size, large to small."""
    place = np.empty(len(cluster), np.int64)
    by_distance = np.lexsort((np.arange(len(cluster)), distance, cluster))
    sizes = np.bincount(cluster)
    starts = np.concatenate([[0], np.cumsum(sizes)[:-1]])
    place[by_distance] = np.arange(len(cluster)) - np.repeat(starts, sizes)
    return np.lexsort((cluster, -sizes[cluster], place))[:n]


def _hashes(points: Floats) -> npt.NDArray[np.uint64]:
    """A number for each row's bytes, the same for equal rows: by multiplication with fixed random ones."""
    width = points.shape[1] + points.shape[1] % 2  # two numbers make a word
    factors = np.random.default_rng(0).integers(1, 2**63, width // 2, np.uint64) | np.uint64(1)
    found = np.zeros(len(points), np.uint64)
    for part in blocks(len(points), 512):
        some = np.ascontiguousarray(points[part], np.float32)
        if some.shape[1] < width:
            some = np.pad(some, ((0, 0), (0, 1)))
        bits = some.view(np.uint64)
        bits = bits ^ (bits >> np.uint64(29))  # a factor carries bits to the left alone
        bits *= factors
        found[part] = bits.sum(axis=1, dtype=np.uint64)
    return found
