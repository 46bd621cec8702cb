"""Union-find gives connected components, named by their smallest member."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.data.similarity.near_duplicates import union

pairs = st.lists(st.tuples(st.integers(0, 19), st.integers(0, 19)), max_size=40)


@settings(max_examples=50, deadline=None)
@given(pairs=pairs, position=st.integers(0, 40))
def test_clusters_are_connected_components(pairs: list[tuple[int, int]], position: int) -> None:
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    cluster = np.arange(20)
    for part in (pairs[:position], pairs[position:]):
        i, j = np.array(part, dtype=np.int64).reshape(-1, 2).T
        union(cluster, i, j)
    i, j = np.array(pairs, dtype=np.int64).reshape(-1, 2).T
    _, labels = connected_components(coo_array((np.ones(len(i)), (i, j)), shape=(20, 20)), directed=False)
    assert cluster.tolist() == [labels.tolist().index(label) for label in labels.tolist()]


def test_a_long_chain() -> None:
    cluster = np.arange(5000)
    order = np.random.default_rng(0).permutation(4999)
    union(cluster, order, order + 1)
    assert not cluster.any()
