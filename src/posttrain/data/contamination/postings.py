"""Inverted index of hashed n-grams: the sets that hold each."""

from collections.abc import Iterator
from typing import NamedTuple, Self

import numpy as np
import numpy.typing as npt

from posttrain.data.arrays import Hashes, Indices
from posttrain.data.duplicates.shingles import Shingles, offsets_of

_MOST_BITS = 24  # 64 MiB of buckets at most

_EXTRA_BITS = 3  # about one entry of the table in 16 is set, so that most other hashes end there

_PAIRS_A_BLOCK = 1 << 22  # 32 MiB for each array of a block


class SharedCounts(NamedTuple):
    """Lists pairs of sets that share members.

    Attributes:
        query: int64 [P], the queried set.
        owner: int64 [P], the indexed set that shares members with it.
        shared: int64 [P], number of members in both.
    """

    query: Indices
    owner: Indices
    shared: Indices


class Postings(NamedTuple):
    """Maps K distinct hashes to the indexed sets that hold each.

    Attributes:
        keys: uint64 [K], sorted.
        offsets: int64 [K + 1].
        owners: int32; the sets that hold key ``k`` are ``owners[offsets[k] : offsets[k + 1]]``, in order.
        table: bool [2^b], whether some key begins with these b bits: most hashes that are no keys end here.
        buckets: int32 [2^c], the first key that begins with these c bits or more.
        width: One more than the last owner.
    """

    keys: Hashes
    offsets: Indices
    owners: npt.NDArray[np.int32]
    table: npt.NDArray[np.bool_]
    buckets: npt.NDArray[np.int32]
    width: int

    @classmethod
    def from_sets(cls, sets: Shingles, owners: Indices) -> Self:
        """Indexes ``sets``; ``owners``: int64 [N], the number that names each of the N sets."""
        owner = np.repeat(owners, sets.sizes)
        order = np.argsort(sets.values)
        values, owner = sets.values[order], owner[order]
        tied = np.zeros(len(values), dtype=bool)  # few; to sort all by both takes three times as long
        equal = values[1:] == values[:-1]
        tied[1:] |= equal
        tied[:-1] |= equal
        owner[tied] = owner[tied][np.lexsort((owner[tied], values[tied]))]
        fresh = np.ones(len(values), dtype=bool)
        fresh[1:] = (values[1:] != values[:-1]) | (owner[1:] != owner[:-1])
        values, owner = values[fresh], owner[fresh]
        first = np.ones(len(values), dtype=bool)
        np.not_equal(values[1:], values[:-1], out=first[1:])
        starts = np.flatnonzero(first)
        keys, counts = values[starts], np.diff(starts, append=len(values))
        bits = min(len(keys).bit_length() + 1, _MOST_BITS)
        table = np.zeros(1 << (bits + _EXTRA_BITS), dtype=bool)
        table[_leading_bits(keys, bits + _EXTRA_BITS)] = True
        buckets = offsets_of(np.bincount(_leading_bits(keys, bits).astype(np.int64), minlength=1 << bits))[:-1]
        width = int(owner.max(initial=0)) + 1
        return cls(keys, offsets_of(counts), owner.astype(np.int32), table, buckets.astype(np.int32), width)

    @property
    def counts(self) -> Indices:
        """Number of sets that hold each key, int64 [K]."""
        return np.diff(self.offsets)

    def among(self, mask: npt.NDArray[np.bool_]) -> Self:
        """Keeps only some of the indexed sets; ``mask``: bool, by owner."""
        inside = mask[self.owners]
        values, owners = np.repeat(self.keys, self.counts)[inside], self.owners[inside].astype(np.int64)
        return self.from_sets(Shingles(values, np.arange(len(values) + 1)), owners)

    def find(self, values: Hashes) -> tuple[Indices, Indices]:
        """Finds the positions in ``values`` that hold a key, in order, and the key at each."""
        if not len(self.keys):
            return np.empty(0, np.int64), np.empty(0, np.int64)
        positions = np.flatnonzero(self.table[_leading_bits(values, len(self.table).bit_length() - 1)])
        candidates = values[positions]
        keys = self.buckets[_leading_bits(candidates, len(self.buckets).bit_length() - 1)].astype(np.int64)
        nearest = self.keys[keys]
        # Few buckets hold two keys; those further back are reached step by step.
        behind = np.flatnonzero(nearest < candidates)
        while len(behind):
            behind = behind[keys[behind] < len(self.keys) - 1]
            keys[behind] += 1
            nearest[behind] = self.keys[keys[behind]]
            behind = behind[nearest[behind] < candidates[behind]]
        is_key = nearest == candidates
        return positions[is_key], keys[is_key]

    def meet(self, query: Indices, keys: Indices, least: int = 1) -> Iterator[SharedCounts]:
        """Yields every pair of a queried and an indexed set that share members, block by block; no pair is split.

        Args:
            query, keys: int64 [H], which set holds which key; in any order, with repetitions.
            least: Members that a pair must share.
        """
        # A key that a set holds several times counts once.
        codes, _ = _count_values(query * len(self.keys) + keys)
        query, keys = codes // max(len(self.keys), 1), codes % max(len(self.keys), 1)
        sizes = self.offsets[keys + 1] - self.offsets[keys]
        if sizes.sum() <= _PAIRS_A_BLOCK:
            yield self._shared_counts(query, keys, sizes, least)
            return
        blocks = np.cumsum(sizes) // _PAIRS_A_BLOCK
        # All members of a set go where its first one goes, so that no pair is split between two blocks.
        blocks = blocks[np.searchsorted(query, query)]
        for block in np.split(np.arange(len(query)), np.flatnonzero(np.diff(blocks)) + 1):
            yield self._shared_counts(query[block], keys[block], sizes[block], least)

    def _shared_counts(self, query: Indices, keys: Indices, sizes: Indices, least: int) -> SharedCounts:
        width, begins = self.width, offsets_of(sizes)
        # Half the bytes are half the time.
        kind = np.int32 if (query.max(initial=0) + 1) * width < 1 << 31 and len(self.owners) < 1 << 31 else np.int64
        positions = np.arange(begins[-1], dtype=kind)
        positions += np.repeat((self.offsets[keys] - begins[:-1]).astype(kind), sizes)
        codes = np.repeat((query * width).astype(kind), sizes)
        codes += self.owners[positions]
        pairs, shared = _count_values(codes, least)
        return SharedCounts(pairs // width, pairs % width, shared)


def _count_values(values: Indices, least: int = 1) -> tuple[Indices, Indices]:
    """Counts distinct values in order, if they occur often enough: faster than np.unique."""
    # Half the bytes are sorted in about half the time.
    values = np.sort(values.astype(np.int32) if values.max(initial=0) < 1 << 31 else values)
    often = np.flatnonzero(values[least - 1 :] == values[: max(len(values) - least + 1, 0)])
    frequent = values[often]
    new = np.ones(len(frequent), dtype=bool)
    np.not_equal(frequent[1:], frequent[:-1], out=new[1:])
    starts = np.flatnonzero(new)
    return frequent[starts].astype(np.int64), np.diff(starts, append=len(frequent)) + least - 1


def _leading_bits(values: Hashes, bits: int) -> Hashes:
    return values >> np.uint64(64 - bits)
