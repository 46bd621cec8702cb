"""Finds the records that hold a hash, and counts the hashes that two records share."""

from collections.abc import Iterator
from typing import NamedTuple, Self

import numpy as np
import numpy.typing as npt

from posttrain.data.arrays import Hashes, Indices
from posttrain.data.similarity.ngrams import Shingles, offsets_of

_EXTRA_BITS = 4  # about one entry of the table in 16 is set, so that most other hashes end there
_MOST_BITS = 26  # 64 MiB
_PAIRS_A_BLOCK = 1 << 22  # 32 MiB of codes


class Shared(NamedTuple):
    """Lists P pairs of a query set and an owner.

    Attributes:
        query: int64 [P], sorted.
        owner: int64 [P].
        sizes: int64 [P], the number of keys that both hold, at least 1.
    """

    query: Indices
    owner: Indices
    sizes: Indices


class HashIndex(NamedTuple):
    """Maps K distinct hashes to the records that hold each.

    Attributes:
        keys: uint64 [K], sorted.
        offsets: int64 [K + 1].
        owners: int64; the records that hold key ``k`` are ``owners[offsets[k] : offsets[k + 1]]``, in order.
        table: bool [2^b], True if some key begins with these b bits: most hashes that are not keys end here.
    """

    keys: Hashes
    offsets: Indices
    owners: Indices
    table: npt.NDArray[np.bool_]

    @classmethod
    def from_hashes(cls, values: Hashes, owners: Indices) -> Self:
        """Indexes hashes [M] and the record that holds each [M], in any order and with repetitions."""
        order = np.lexsort((owners, values))
        values, owners = values[order], owners[order]
        new_key = np.ones(len(values), dtype=bool)
        np.not_equal(values[1:], values[:-1], out=new_key[1:])
        fresh = new_key.copy()
        fresh[1:] |= owners[1:] != owners[:-1]
        starts = np.flatnonzero(new_key[fresh])
        keys = values[new_key]
        bits = min(len(keys).bit_length() + _EXTRA_BITS, _MOST_BITS)
        table = np.zeros(1 << bits, dtype=bool)
        table[keys >> np.uint64(64 - bits)] = True
        return cls(keys, np.append(starts, np.count_nonzero(fresh)), owners[fresh], table)

    def find(self, values: Hashes) -> tuple[Indices, Indices]:
        """Finds the positions in ``values`` that hold a key, in order, and the key at each."""
        # The table stays in the processor's cache, which a binary search misses.
        positions = np.flatnonzero(self.table[values >> np.uint64(64 - (len(self.table).bit_length() - 1))])
        if not len(self.keys):
            return positions, positions
        keys = np.minimum(np.searchsorted(self.keys, values[positions]), len(self.keys) - 1)
        is_key = self.keys[keys] == values[positions]
        return positions[is_key], keys[is_key]

    def shared(self, sets: Shingles) -> Iterator[Shared]:
        """Yields every set with every record that holds some of its members; all pairs of a set come together."""
        positions, keys = self.find(sets.values)
        queries = np.searchsorted(sets.offsets, positions, side="right") - 1
        # A key that a set holds several times counts once.
        codes = np.sort(queries * max(len(self.keys), 1) + keys)
        queries, keys = np.divmod(codes[np.diff(codes, prepend=-1) > 0], max(len(self.keys), 1))
        sizes = np.diff(self.offsets)[keys]
        # Records of one template share most keys, so that the pairs of all sets may exceed memory.
        blocks = np.flatnonzero(np.diff(np.cumsum(sizes) // _PAIRS_A_BLOCK)) + 1
        borders = np.unique(np.searchsorted(queries, queries[blocks]))
        owners = int(self.owners.max(initial=0)) + 1
        for block in np.split(np.arange(len(queries)), borders):
            begins = offsets_of(sizes[block])
            at = np.arange(begins[-1]) + np.repeat(self.offsets[keys[block]] - begins[:-1], sizes[block])
            pairs, counts = np.unique(
                np.repeat(queries[block], sizes[block]) * owners + self.owners[at], return_counts=True
            )
            yield Shared(*np.divmod(pairs, owners), counts)
