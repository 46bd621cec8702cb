"""The inverted index agrees with intersections of Python sets."""

import numpy as np
import pytest
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


@pytest.mark.slow
@settings(max_examples=50, deadline=None)
@given(SETS, SETS, st.integers(1, 15), st.sampled_from([8, 1 << 22]))
def test_sets_that_share_enough_members_meet(
    index_sets: list[set[int]], query_sets: list[set[int]], least: int, block: int
) -> None:
    index, original_block = (
        Postings.from_sets(shingles(index_sets), np.arange(len(index_sets))),
        postings._PAIRS_A_BLOCK,
    )
    sets = shingles(query_sets)
    positions, keys = index.find(sets.values)
    postings._PAIRS_A_BLOCK = block
    try:
        result = [
            pair
            for meetings in index.meet(owning_set(sets, positions), keys, least)
            for pair in zip(*(column.tolist() for column in meetings), strict=True)
        ]
    finally:
        postings._PAIRS_A_BLOCK = original_block
    shared = {(a, b): len(item & other) for a, item in enumerate(query_sets) for b, other in enumerate(index_sets)}
    assert sorted(result) == sorted((a, b, count) for (a, b), count in shared.items() if count >= least)
