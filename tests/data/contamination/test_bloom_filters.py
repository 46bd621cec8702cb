"""Bitmaps of 5-grams: what they rule out is not there."""

import numpy as np
import pyarrow as pa
import pytest

from posttrain.data.contamination.sketches import STRETCH, BloomFilters, build_bloom_filters
from posttrain.data.duplicates.shingles import Hashes, Shingles, offsets_of

NOTHING = Shingles(np.empty(0, np.uint64), np.zeros(1, np.int64)), np.empty(0, np.int64)


def texts(rng: np.random.Generator, sizes: list[int]) -> Shingles:
    values = rng.integers(0, 1 << 63, sum(sizes), dtype=np.uint64) * np.uint64(2)
    return Shingles(values, offsets_of(np.array(sizes)))


def grams_of(found: Shingles, row: int) -> Hashes:
    return found.values[found.offsets[row] : found.offsets[row + 1]]


@pytest.mark.parametrize("stretches", [1, 2, 3, 7])
def test_what_stands_together_is_found(stretches: int) -> None:
    rng = np.random.default_rng(stretches)
    held = texts(rng, [1, 30, STRETCH, STRETCH + 1, 3 * STRETCH, 10 * STRETCH - 1])
    filters = BloomFilters(build_bloom_filters(held, *NOTHING))
    for row in range(6):
        grams = grams_of(held, row)
        width = min(len(grams), (stretches - 1) * STRETCH + 1)
        for _ in range(20):
            begin = int(rng.integers(0, len(grams) - width + 1))
            subset = rng.permutation(grams[begin : begin + width])[: int(rng.integers(1, 400))]
            strange = rng.integers(0, 1 << 63, len(subset) // 4, dtype=np.uint64)
            members = np.unique(np.concatenate([subset, strange]))
            assert row in filters.near(members, len(strange), stretches)
            longer = len(grams) > stretches * STRETCH
            assert (row in filters.near_long(members, len(strange), stretches)) == longer


def test_most_of_what_is_not_there_is_ruled_out() -> None:
    rng = np.random.default_rng(0)
    filters = BloomFilters(build_bloom_filters(texts(rng, [900] * 200), *NOTHING))
    queries = np.unique(rng.integers(0, 1 << 63, 300, dtype=np.uint64) * np.uint64(2))
    assert len(filters.near(queries, 60, 1)) == 0
    assert len(filters.near(queries, 300, 1)) == 200


def test_other_grams_count_as_held_by_their_text() -> None:
    rng = np.random.default_rng(1)
    held, others = texts(rng, [50, 50, 3000]), texts(rng, [30, 40])
    filters = BloomFilters(build_bloom_filters(held, others, np.array([1, 2])))
    assert filters.near(grams_of(others, 0), 0, 1).tolist() == [1]
    assert filters.near(np.sort(grams_of(others, 1)), 0, 1).tolist() == [2]


def test_a_piece_of_a_column_is_read_as_itself() -> None:
    rng = np.random.default_rng(2)
    held = texts(rng, [100, 5000, 20, 2000, 7])
    column = build_bloom_filters(held, *NOTHING)
    whole, piece = BloomFilters(column), BloomFilters(pa.chunked_array([column.slice(1, 2), column.slice(3, 1)]))
    for row in range(1, 4):
        members = np.sort(grams_of(held, row)[:50])
        assert (whole.near(members, 0, 1) - 1).tolist() == piece.near(members, 0, 1).tolist() == [row - 1]
