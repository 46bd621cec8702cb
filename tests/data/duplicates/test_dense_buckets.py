"""Dense buckets hold every large bucket whole, and merge chains of buckets only if that is less work."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.data.duplicates import candidates as module
from posttrain.data.duplicates.candidates import DenseBuckets, equal_runs


@pytest.fixture(autouse=True)
def small_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_PAIRS_OF_DENSE_BUCKET", 6)
    monkeypatch.setattr(module, "_PAIRS_A_ROW", 0)


def in_order(keys: list[int]) -> tuple[np.ndarray, np.ndarray]:
    values = np.array(keys, dtype=np.uint64)
    return values, np.argsort(values, kind="stable")


def dense_buckets(*bands: list[int], old: int = 0, cluster: np.ndarray | None = None) -> DenseBuckets:
    keys, members = zip(*map(in_order, bands), strict=True)
    return DenseBuckets.from_bands(keys, members, np.arange(len(bands[0])) if cluster is None else cluster, old)


def test_buckets_that_share_most_rows_are_merged() -> None:
    dense = dense_buckets([1, 1, 1, 1, 1, 2], [1, 1, 1, 1, 2, 2])
    assert [rows.tolist() for rows in dense.rows] == [[0, 1, 2, 3, 4]]
    rows = np.arange(6)
    assert dense.hold(rows[:-1], rows[1:]).tolist() == [True, True, True, True, False]
    keys, members = in_order([1, 1, 1, 1, 2, 2])
    assert dense.outside(keys, members).tolist() == [4, 5]


def test_a_chain_of_buckets_is_not_merged() -> None:
    first_band = [0] * 8 + [1] * 8 + [2] * 8
    second_band = [10, 11, 12, 13] + [0] * 8 + [1] * 8 + [14, 15, 16, 17]
    dense = dense_buckets(first_band, second_band)
    expected = [range(8), range(8, 16), range(16, 24), range(4, 12), range(12, 20)]
    assert [rows.tolist() for rows in dense.rows] == [list(rows) for rows in expected]
    i, j = np.array([0, 4, 7, 0, 3, 15]), np.array([7, 11, 11, 8, 8, 19])
    assert dense.hold(i, j).tolist() == [True, True, True, False, False, True]
    assert len(dense.outside(*in_order(first_band))) == 0


def test_one_cluster_or_old_rows_give_no_dense_bucket() -> None:
    assert not dense_buckets([0] * 9, cluster=np.zeros(9, dtype=np.int64)).rows
    assert not dense_buckets([0] * 9, old=9).rows
    assert not dense_buckets([0] * 6, old=5).rows
    assert len(dense_buckets([0] * 9, old=8).rows) == 1


@settings(max_examples=40, deadline=None)
@given(data=st.data(), count=st.integers(1, 40), old=st.integers(0, 40))
def test_every_large_bucket_is_in_a_dense_bucket(data: st.DataObject, count: int, old: int) -> None:
    numbers = st.lists(st.integers(0, 5), min_size=count, max_size=count)
    bands = data.draw(st.lists(numbers, min_size=1, max_size=4))
    cluster = np.array(data.draw(numbers)) % count
    dense = dense_buckets(*bands, old=old, cluster=cluster)
    for band in bands:
        keys, members = in_order(band)
        rows_outside = set(dense.outside(keys, members).tolist())
        for key in set(band):
            rows = np.flatnonzero(keys == np.uint64(key))
            pairs = [(i, j) for i in rows for j in rows[rows > i] if j >= old and cluster[i] != cluster[j]]
            if len(pairs) >= 6:
                assert not rows_outside & set(rows.tolist())
            if len(pairs) and not rows_outside & set(rows.tolist()):
                i, j = np.array(pairs).T
                assert dense.hold(i, j).all()


def test_equal_runs() -> None:
    starts, sizes = equal_runs(np.array([3, 3, 1, 1, 1]), np.array([0, 0, 0, 1, 1]))
    assert starts.tolist() == [0, 2, 3]
    assert sizes.tolist() == [2, 1, 2]
