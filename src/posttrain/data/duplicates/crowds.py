"""Where so many texts share a bucket that their pairs are better compared all at once
(`posttrain.data.duplicates.all_pairs`)."""

from collections.abc import Sequence
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from posttrain.data.duplicates.union import union

Indices = npt.NDArray[np.int64]

_PAIRS_A_CROWD = 8_192
_PAIRS_A_ROW = 1_000  # to read a text takes as long as to compare so many pairs


class Crowds(NamedTuple):
    """Sets of rows all of whose pairs are compared.

    Attributes:
        rows: the rows of each crowd, int64.
        names: int32 [N] each, the crowd of every row or -1; a row is in one crowd of each array at most.
    """

    rows: Sequence[Indices]
    names: Sequence[npt.NDArray[np.int32]]

    @classmethod
    def of(
        cls, bands: Sequence[npt.NDArray[np.uint64]], buckets: Sequence[Indices], cluster: Indices, old: int
    ) -> Self:
        """Crowded buckets; those that share rows are one crowd where that is less work.

        Args:
            bands: uint64 [N] each, the key of every row.
            buckets: for each band rows, those with one key one behind the other.
            old: pairs of rows before this one are not to be compared.
        """
        found = [_crowded(keys, members, cluster, old) for keys, members in zip(bands, buckets, strict=True)]
        if not any(len(members) for members, _ in found):
            return cls([], [])
        root = np.arange(len(cluster))
        for members, starts in found:
            union(root, members, np.repeat(members[starts], np.diff(starts, append=len(members))))
        everyone = np.unique(np.concatenate([members for members, _ in found]))
        whole = _cost(root[everyone], everyone, cluster, old)
        parted = np.zeros(len(cluster))
        for members, starts in found:
            label = np.repeat(members[starts], np.diff(starts, append=len(members)))
            parted += np.bincount(root, weights=_cost(label, members, cluster, old), minlength=len(cluster))
        together = whole <= parted
        crowds: list[Indices] = []
        names = []
        joined = everyone[together[root[everyone]]]
        joined = joined[np.argsort(root[joined], kind="stable")]
        names.append(_named(crowds, joined, root[joined], len(cluster)))
        for members, starts in found:
            label = np.repeat(members[starts], np.diff(starts, append=len(members)))
            alone = ~together[root[members]]
            if alone.any():
                names.append(_named(crowds, members[alone], label[alone], len(cluster)))
        return cls(crowds, names)

    def hold(self, i: Indices, j: Indices) -> npt.NDArray[np.bool_]:
        """Whether the rows ``i[p]`` and ``j[p]`` are in one crowd."""
        held = np.zeros(len(i), dtype=bool)
        for names in self.names:
            held |= (names[i] == names[j]) & (names[i] >= 0)
        return held

    def outside(self, keys: npt.NDArray[np.uint64], members: Indices) -> Indices:
        """The members of the buckets that are not whole in one crowd."""
        if not self.names or not len(members):
            return members
        starts, sizes = runs(keys[members])
        inside = np.zeros(len(starts), dtype=bool)
        for names in self.names:
            lowest, highest = (reduce.reduceat(names[members], starts) for reduce in (np.minimum, np.maximum))
            inside |= (lowest == highest) & (lowest >= 0)
        left: Indices = members[~np.repeat(inside, sizes)]
        return left


def runs(*columns: npt.NDArray[Any]) -> tuple[Indices, Indices]:
    """Where runs of equal values begin, and how long they are."""
    count = len(columns[0])
    new = np.zeros(count, dtype=bool)
    new[:1] = True
    for values in columns:
        new[1:] |= values[1:] != values[:-1]
    starts = np.flatnonzero(new)
    return starts, np.diff(starts, append=count)


def _crowded(keys: npt.NDArray[np.uint64], members: Indices, cluster: Indices, old: int) -> tuple[Indices, Indices]:
    """Members of the crowded buckets of a band, and where these begin."""
    _, sizes = runs(keys[members])
    members = members[np.repeat(sizes * (sizes - 1) // 2 >= _PAIRS_A_CROWD, sizes)]
    starts, sizes = runs(keys[members])
    label = np.repeat(np.arange(len(starts)), sizes)
    members = members[(_crossing(label, members, cluster, old) >= _PAIRS_A_CROWD)[label]]
    return members, runs(keys[members])[0]


def _cost(label: Indices, rows: Indices, cluster: Indices, old: int) -> npt.NDArray[np.float64]:
    """The work that groups of rows are, by label, in pairs: float64 [N]."""
    work = np.zeros(len(cluster))
    width = label.max(initial=-1) + 1
    work[:width] = np.bincount(label) * _PAIRS_A_ROW + _crossing(label, rows, cluster, old)
    return work


def _crossing(label: Indices, rows: Indices, cluster: Indices, old: int) -> Indices:
    """How many pairs the rows of each label make that lie in two clusters and are not both old."""

    def pairs(group: Indices) -> Indices:
        every, before = np.bincount(group), np.bincount(group[rows < old], minlength=group.max(initial=-1) + 1)
        return np.asarray((every * (every - 1) - before * (before - 1)) // 2, dtype=np.int64)

    both = label * len(cluster) + cluster[rows]
    names, place = np.unique(both, return_inverse=True)
    within = np.zeros(label.max(initial=-1) + 1, dtype=np.int64)
    np.add.at(within, names // len(cluster), pairs(place))
    return pairs(label) - within


def _named(crowds: list[Indices], rows: Indices, label: Indices, count: int) -> npt.NDArray[np.int32]:
    """Adds the rows of each label, which stand together, to the crowds, and says of every row in which it is."""
    names = np.full(count, -1, dtype=np.int32)
    starts, sizes = runs(label)
    names[rows] = np.repeat(np.arange(len(crowds), len(crowds) + len(starts)), sizes)
    if len(starts):
        crowds += np.split(rows, starts[1:])
    return names
