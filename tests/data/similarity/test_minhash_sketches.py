"""Sketches agree at the rates of the formulas."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.data.similarity.minhash import banding, minhash_sketch, required_matching_bits, signatures
from posttrain.data.similarity.ngrams import Shingles

SIMILARITY = 0.8


def miss_rate(threshold: float, bands: int, rows: int) -> float:
    return float((1 - threshold**rows) ** bands)


@given(threshold=st.floats(0.05, 1))
@settings(max_examples=20, deadline=None)
def test_banding_keeps_the_miss_rate(threshold: float) -> None:
    bands, rows = banding(threshold)
    assert miss_rate(threshold, bands, rows) <= 0.00095
    assert rows == 1 or bands * rows <= 128
    assert bands == 1 or miss_rate(threshold, bands - 1, rows) > 0.00095


def test_default_banding() -> None:
    assert banding(0.8) == (18, 5)
    assert banding(1.0)[0] == 1
    assert banding(0.01).rows == 1


@pytest.mark.parametrize("threshold", [0.3, 0.8, 0.95, 1.0])
def test_required_bits_keep_the_miss_rate(threshold: float) -> None:
    chance = (1 + threshold) / 2

    def below(k: int) -> float:
        return sum(math.comb(64, n) * chance**n * (1 - chance) ** (64 - n) for n in range(k))

    num_bits = required_matching_bits(threshold)
    assert below(num_bits) <= 5.1e-5
    assert num_bits == 64 or below(num_bits + 1) > 4.9e-5


@pytest.fixture(scope="module")
def minima() -> np.ndarray:
    """Signatures [2, 2000, 90] of pairs of sets that share 80 of 100 members in all."""
    draws = np.random.default_rng(1)
    members = draws.integers(0, 2**64, size=(2000, 100), dtype=np.uint64)
    sides = [members[:, :90], np.delete(members, slice(80, 90), axis=1)]
    offsets = np.arange(0, 2000 * 90 + 1, 90)
    return np.stack([signatures(Shingles(side.ravel(), offsets), 90) for side in sides])


def test_minima_agree_at_the_rate_of_similarity(minima: np.ndarray) -> None:
    share = (minima[0] == minima[1]).mean()
    assert abs(share - SIMILARITY) < 5 * math.sqrt(SIMILARITY * (1 - SIMILARITY) / minima[0].size)
    bits = ((minima[0] ^ minima[1]) & 1 == 0).mean()
    assert abs(bits - (1 + SIMILARITY) / 2) < 0.005


def test_bands_agree_at_the_rate_of_the_formula(minima: np.ndarray) -> None:
    equal = (minima[0] == minima[1]).reshape(-1, 18, 5).all(axis=2)
    assert abs(equal.mean() - SIMILARITY**5) < 0.02
    assert (~equal.any(axis=1)).mean() <= 0.004


def test_a_sketch_depends_only_on_its_text() -> None:
    texts = ["the cat sat on the mat", "", "The  CAT sat on the mat", "mat the on sat cat the"]
    table = minhash_sketch(texts)
    assert table.column_names == ["grams", "bits", *(f"band_{band}" for band in range(18))]
    rows = [tuple(row.values()) for row in table.to_pylist()]
    assert rows[0] == rows[2]
    assert len(set(rows)) == 3
    assert rows == [tuple(minhash_sketch([text]).to_pylist()[0].values()) for text in texts]
    assert minhash_sketch([]).schema == table.schema
