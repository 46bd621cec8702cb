"""Bloom filters over 5-grams never rule out a text that holds the query."""

import numpy as np
import pyarrow as pa
import pytest

from posttrain.data.arrays import Hashes
from posttrain.data.contamination.sketches import STRETCH, BloomFilters, build_bloom_filters
from posttrain.data.duplicates.shingles import Shingles, offsets_of

EMPTY = Shingles(np.empty(0, np.uint64), np.zeros(1, np.int64)), np.empty(0, np.int64)


def texts(rng: np.random.Generator, sizes: list[int]) -> Shingles:
    values = rng.integers(0, 1 << 63, sum(sizes), dtype=np.uint64) * np.uint64(2)
    return Shingles(values, offsets_of(np.array(sizes)))


def grams_of(sets: Shingles, row: int) -> Hashes:
    return sets.values[sets.offsets[row] : sets.offsets[row + 1]]


@pytest.mark.parametrize("stretches", [1, 2, 3, 7])
def test_members_of_neighbouring_stretches_are_found(stretches: int) -> None:
    rng = np.random.default_rng(stretches)
    corpus = texts(rng, [1, 30, STRETCH, STRETCH + 1, 3 * STRETCH, 10 * STRETCH - 1])
    filters = BloomFilters(build_bloom_filters(corpus, *EMPTY))
    for row in range(6):
        grams = grams_of(corpus, row)
        width = min(len(grams), (stretches - 1) * STRETCH + 1)
        for _ in range(20):
            begin = int(rng.integers(0, len(grams) - width + 1))
            subset = rng.permutation(grams[begin : begin + width])[: int(rng.integers(1, 400))]
            strange = rng.integers(0, 1 << 63, len(subset) // 4, dtype=np.uint64)
            members = np.unique(np.concatenate([subset, strange]))
            assert row in filters.near(members, len(strange), stretches)
            longer = len(grams) > stretches * STRETCH
            assert (row in filters.near_long(members, len(strange), stretches)) == longer


def test_most_absent_members_are_ruled_out() -> None:
    rng = np.random.default_rng(0)
    filters = BloomFilters(build_bloom_filters(texts(rng, [900] * 200), *EMPTY))
    queries = np.unique(rng.integers(0, 1 << 63, 300, dtype=np.uint64) * np.uint64(2))
    assert len(filters.near(queries, 60, 1)) == 0
    assert len(filters.near(queries, 300, 1)) == 200


def test_extra_grams_belong_to_their_text() -> None:
    rng = np.random.default_rng(1)
    corpus, extra = texts(rng, [50, 50, 3000]), texts(rng, [30, 40])
    filters = BloomFilters(build_bloom_filters(corpus, extra, np.array([1, 2])))
    assert filters.near(grams_of(extra, 0), 0, 1).tolist() == [1]
    assert filters.near(np.sort(grams_of(extra, 1)), 0, 1).tolist() == [2]


def test_slices_of_a_column_give_the_same_filters() -> None:
    rng = np.random.default_rng(2)
    corpus = texts(rng, [100, 5000, 20, 2000, 7])
    column = build_bloom_filters(corpus, *EMPTY)
    all_rows, slices = BloomFilters(column), BloomFilters(pa.chunked_array([column.slice(1, 2), column.slice(3, 1)]))
    for row in range(1, 4):
        members = np.sort(grams_of(corpus, row)[:50])
        assert (all_rows.near(members, 0, 1) - 1).tolist() == slices.near(members, 0, 1).tolist() == [row - 1]
