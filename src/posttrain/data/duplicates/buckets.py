"""Groups rows: clusters by union-find, and the dense buckets, all of whose pairs are compared."""

from collections.abc import Sequence
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from posttrain.data.arrays import Indices

_PAIRS_OF_DENSE_BUCKET = 8_192  # from here on comparing all pairs at once is the faster way


_PAIRS_A_ROW = 1_000  # to read a text takes as long as to compare so many pairs


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


class DenseBuckets(NamedTuple):
    """Groups rows all of whose pairs are compared.

    Attributes:
        rows: The rows of each group, int64.
        names: int32 [N] each, the group of every row or -1; a row is in one group of each array at most.
    """

    rows: Sequence[Indices]
    names: Sequence[npt.NDArray[np.int32]]

    @classmethod
    def from_bands(
        cls, bands: Sequence[npt.NDArray[np.uint64]], buckets: Sequence[Indices], cluster: Indices, old: int
    ) -> Self:
        """Finds dense buckets, and joins those that share rows if that is less work.

        Args:
            bands: uint64 [N] each, the key of every row.
            buckets: Rows for each band, those with one key one behind the other.
            old: Pairs of rows before this one are not to be compared.
        """
        dense = [_dense(keys, members, cluster, old) for keys, members in zip(bands, buckets, strict=True)]
        if not any(len(members) for members, _ in dense):
            return cls([], [])
        root = np.arange(len(cluster))
        for members, starts in dense:
            union(root, members, np.repeat(members[starts], np.diff(starts, append=len(members))))
        all_rows = np.unique(np.concatenate([members for members, _ in dense]))
        # Joining buckets reads each text once, but compares pairs that share no bucket.
        cost_joined = _pair_cost(root[all_rows], all_rows, cluster, old)
        cost_apart = np.zeros(len(cluster))
        for members, starts in dense:
            label = np.repeat(members[starts], np.diff(starts, append=len(members)))
            cost_apart += np.bincount(root, weights=_pair_cost(label, members, cluster, old), minlength=len(cluster))
        joining_pays = cost_joined <= cost_apart
        groups: list[Indices] = []
        names = []
        joined_rows = all_rows[joining_pays[root[all_rows]]]
        joined_rows = joined_rows[np.argsort(root[joined_rows], kind="stable")]
        names.append(_name_buckets(groups, joined_rows, root[joined_rows], len(cluster)))
        for members, starts in dense:
            label = np.repeat(members[starts], np.diff(starts, append=len(members)))
            separate = ~joining_pays[root[members]]
            if separate.any():
                names.append(_name_buckets(groups, members[separate], label[separate], len(cluster)))
        return cls(groups, names)

    def hold(self, i: Indices, j: Indices) -> npt.NDArray[np.bool_]:
        """Returns True where the rows ``i[p]`` and ``j[p]`` are in one group."""
        together = np.zeros(len(i), dtype=bool)
        for names in self.names:
            together |= (names[i] == names[j]) & (names[i] >= 0)
        return together

    def outside(self, keys: npt.NDArray[np.uint64], members: Indices) -> Indices:
        """Selects the members of the buckets that do not lie in one group as a whole."""
        if not self.names or not len(members):
            return members
        starts, sizes = equal_runs(keys[members])
        inside = np.zeros(len(starts), dtype=bool)
        for names in self.names:
            lowest, highest = (reduce.reduceat(names[members], starts) for reduce in (np.minimum, np.maximum))
            inside |= (lowest == highest) & (lowest >= 0)
        rest: Indices = members[~np.repeat(inside, sizes)]
        return rest


def equal_runs(*columns: npt.NDArray[Any]) -> tuple[Indices, Indices]:
    """Finds the starts and lengths of runs of equal values."""
    count = len(columns[0])
    new = np.zeros(count, dtype=bool)
    new[:1] = True
    for values in columns:
        new[1:] |= values[1:] != values[:-1]
    starts = np.flatnonzero(new)
    return starts, np.diff(starts, append=count)


def _dense(keys: npt.NDArray[np.uint64], members: Indices, cluster: Indices, old: int) -> tuple[Indices, Indices]:
    """Finds the members of a band's dense buckets, and the start of each bucket."""
    _, sizes = equal_runs(keys[members])
    # The number of all pairs bounds that of pairs across clusters: most buckets end here.
    members = members[np.repeat(sizes * (sizes - 1) // 2 >= _PAIRS_OF_DENSE_BUCKET, sizes)]
    starts, sizes = equal_runs(keys[members])
    label = np.repeat(np.arange(len(starts)), sizes)
    members = members[(_pairs_across_clusters(label, members, cluster, old) >= _PAIRS_OF_DENSE_BUCKET)[label]]
    return members, equal_runs(keys[members])[0]


def _pair_cost(label: Indices, rows: Indices, cluster: Indices, old: int) -> npt.NDArray[np.float64]:
    """Estimates the cost of comparing groups of rows, by label, in units of one pair: float64 [N]."""
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
    """Adds the rows of each label, which are adjacent, to the groups, and returns the group of every row."""
    names = np.full(count, -1, dtype=np.int32)
    starts, sizes = equal_runs(label)
    names[rows] = np.repeat(np.arange(len(groups), len(groups) + len(starts)), sizes)
    if len(starts):
        groups += np.split(rows, starts[1:])
    return names
