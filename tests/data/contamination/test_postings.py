"""An inverted index against sets of Python's own."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.data.contamination import postings
from posttrain.data.contamination.postings import Postings
from posttrain.data.duplicates.shingles import Shingles, offsets_of, owning_set

SETS = st.lists(st.sets(st.integers(0, 30), max_size=20), max_size=12)


def shingles(sets: list[set[int]]) -> Shingles:
    """The sets, their members spread over all 64 bits."""
    values = [np.sort(np.array([member * 0x0765_4321_0FED_CBA9 for member in item], np.uint64)) for item in sets]
    sizes = np.array([len(item) for item in sets], np.int64)
    return Shingles(np.concatenate([np.empty(0, np.uint64), *values]), offsets_of(sizes))


@settings(max_examples=200, deadline=None)
@given(SETS, SETS, st.integers(1, 15), st.sampled_from([8, 1 << 22]))
def test_sets_that_share_enough_members_meet(
    indexed: list[set[int]], asked: list[set[int]], least: int, block: int
) -> None:
    index, before = Postings.of(shingles(indexed), np.arange(len(indexed))), postings._PAIRS_A_BLOCK
    sets = shingles(asked)
    places, keys = index.find(sets.values)
    postings._PAIRS_A_BLOCK = block
    try:
        result = [
            pair
            for meetings in index.meet(owning_set(sets, places), keys, least)
            for pair in zip(*(column.tolist() for column in meetings), strict=True)
        ]
    finally:
        postings._PAIRS_A_BLOCK = before
    shared = {(a, b): len(item & other) for a, item in enumerate(asked) for b, other in enumerate(indexed)}
    assert sorted(result) == sorted((a, b, count) for (a, b), count in shared.items() if count >= least)
