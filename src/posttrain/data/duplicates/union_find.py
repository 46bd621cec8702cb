"""Union-find whose result does not depend on the order of the pairs."""

import numpy as np
import numpy.typing as npt

Indices = npt.NDArray[np.int64]


def union(cluster: Indices, i: Indices, j: Indices) -> None:
    """Joins in place the clusters of ``i[p]`` and ``j[p]``.

    Args:
        cluster: int64 [N], of every member the smallest index of its cluster; so it is again afterwards.
    """
    while len(i):
        a, b = cluster[i], cluster[j]
        apart = a != b
        i, j, a, b = i[apart], j[apart], a[apart], b[apart]
        # The smaller index always wins, so the result does not depend on the order of the pairs.
        np.minimum.at(cluster, np.maximum(a, b), np.minimum(a, b))
        _flatten(cluster)


def _flatten(cluster: Indices) -> None:
    """Points every member at its root; each pass halves the paths."""
    above = cluster[cluster]
    while not np.array_equal(above, cluster):
        cluster[:] = above
        above = cluster[cluster]
