"""The index agrees with a dictionary of lists."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from posttrain.data.similarity import hash_index
from posttrain.data.similarity.hash_index import HashIndex
from posttrain.data.similarity.ngrams import Shingles


def spread(values: list[int]) -> np.ndarray:
    """The values, spread over all 64 bits."""
    return np.array(values, np.uint64) * np.uint64(0x0765_4321_0FED_CBA9)


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 30), st.integers(0, 9)), max_size=40), st.lists(st.integers(0, 40), max_size=9)
)
def test_every_record_that_holds_a_hash_is_found(held: list[tuple[int, int]], queries: list[int]) -> None:
    index = HashIndex.from_hashes(
        spread([value for value, _ in held]), np.array([owner for _, owner in held], np.int64)
    )
    positions, keys = index.find(spread(queries))
    assert positions.tolist() == [at for at, query in enumerate(queries) if query in {value for value, _ in held}]
    assert index.keys[keys].tolist() == spread(queries)[positions].tolist()


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 30), st.integers(0, 9)), max_size=40),
    st.lists(st.lists(st.integers(0, 40), max_size=9), max_size=5),
    st.integers(1, 50),
)
@example([(1, 0)], [[1, 1]], 50)
def test_shared_members_are_counted_once(held: list[tuple[int, int]], sets: list[list[int]], pairs: int) -> None:
    index = HashIndex.from_hashes(
        spread([value for value, _ in held]), np.array([owner for _, owner in held], np.int64)
    )
    offsets = np.cumsum([0, *map(len, sets)])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hash_index, "_PAIRS_A_BLOCK", pairs)
        blocks = list(index.shared(Shingles(spread([value for members in sets for value in members]), offsets)))
    counts = Counter(
        (query, owner) for query, members in enumerate(sets) for value, owner in set(held) if value in members
    )
    assert [item for block in blocks for item in zip(*(column.tolist() for column in block), strict=True)] == [
        (*pair, count) for pair, count in sorted(counts.items())
    ]
    queries = [set(block.query.tolist()) for block in blocks]
    assert sum(map(len, queries)) == len(set().union(*queries))
