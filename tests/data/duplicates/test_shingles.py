"""Hashed n-grams are the sets that they stand for."""

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.data.duplicates import shingles
from posttrain.data.duplicates.shingles import (
    Unit,
    intersections,
    jaccard,
    ngram_sequences,
    ngram_sets,
    select_sets,
    splitmix64,
)
from posttrain.data.records.identity import fold_case

LETTERS = "abAB. \n\t\x1c\u00a0\u2003\u0301\u00e9\u1e9e\u0130\ufb01\u6f22\U0001f600"
corpora = st.lists(st.text(LETTERS, max_size=14) | st.text("aB \n.", max_size=14), max_size=8)
units = st.sampled_from(["character", "word"])


def as_set(text: str, ngram: int, unit: Unit) -> set[tuple[str, ...]]:
    folded = fold_case(text)
    parts = list(folded) if unit == "character" else folded.split(" ")
    return {tuple(parts[at : at + ngram]) for at in range(max(1, len(parts) - ngram + 1))}


@settings(max_examples=300, deadline=None)
@given(texts=corpora, ngram=st.integers(1, 9), unit=units)
def test_hashes_are_the_sets(texts: list[str], ngram: int, unit: Unit) -> None:
    hashed = ngram_sets(texts, ngram, unit)
    sets = [as_set(text, ngram, unit) for text in texts]
    assert hashed.values.dtype == np.uint64
    assert hashed.offsets.dtype == np.int64
    assert hashed.offsets[0] == 0
    assert hashed.sizes.tolist() == [len(item) for item in sets]
    for begin, end in zip(hashed.offsets[:-1], hashed.offsets[1:], strict=True):
        assert (np.diff(hashed.values[begin:end].astype(object)) > 0).all()
    i, j = (axis.ravel() for axis in np.indices((len(texts), len(texts))))
    pairs = list(zip(i.tolist(), j.tolist(), strict=True))
    assert intersections(hashed, hashed, i, j).tolist() == [len(sets[a] & sets[b]) for a, b in pairs]
    assert jaccard(hashed, hashed, i, j).tolist() == [len(sets[a] & sets[b]) / len(sets[a] | sets[b]) for a, b in pairs]


@settings(max_examples=100, deadline=None)
@given(texts=corpora, ngram=st.integers(1, 9), unit=units)
def test_a_hash_depends_on_its_ngram_alone(texts: list[str], ngram: int, unit: Unit) -> None:
    together = ngram_sets(texts, ngram, unit)
    one_by_one = [ngram_sets([text], ngram, unit).values for text in texts]
    assert together.values.tolist() == [value for item in one_by_one for value in item.tolist()]
    in_order = ngram_sequences(texts, ngram, unit)
    for row, item in enumerate(one_by_one):
        assert np.array_equal(np.unique(in_order.values[in_order.offsets[row] : in_order.offsets[row + 1]]), item)


def test_blocks_and_chunks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = ["The cat sat", "on", "", "the Cat  sat on the mat", "\u00c9t\u00e9", "ete" * 50] * 3
    i, j = (axis.ravel() for axis in np.indices((len(texts), len(texts))))
    whole = ngram_sets(texts, 3)
    shared = intersections(whole, whole, i, j)
    monkeypatch.setattr(shingles, "_CHARACTERS_A_BLOCK", 7)
    monkeypatch.setattr(shingles, "_MEMBERS_A_CHUNK", 11)
    cut = ngram_sets(pa.array(texts), 3)
    assert np.array_equal(cut.values, whole.values)
    assert np.array_equal(cut.offsets, whole.offsets)
    assert np.array_equal(intersections(cut, cut, i, j), shared)


def test_members_picks_sets() -> None:
    hashed = ngram_sets(["abcdef", "x", "abc"], 2)
    picked = select_sets(hashed, np.array([2, 0, 0]))
    assert picked.sizes.tolist() == [2, 5, 5]
    assert picked.values.tolist() == [*hashed.values[6:], *hashed.values[:5], *hashed.values[:5]]


def test_every_bit_of_a_hash_is_even() -> None:
    values = ngram_sets([" ".join(str(number) for number in range(20_000))], 5).values
    ones = np.array([(values >> np.uint64(bit) & np.uint64(1)).mean() for bit in range(64)])
    assert len(values) > 50_000
    assert np.abs(ones - 0.5).max() < 5 * 0.5 / np.sqrt(len(values))


def test_the_mixture_is_splitmix64() -> None:
    # The first outputs for seed 0 of the reference implementation, whose state grows by the golden ratio.
    states = np.arange(1, 4, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    assert [hex(value) for value in splitmix64(states).tolist()] == [
        "0xe220a8397b1dcdaf",
        "0x6e789e6aa1b965f4",
        "0x6c45d188009454f",
    ]


def test_an_ngram_of_nothing() -> None:
    with pytest.raises(ValueError, match="n-gram"):
        ngram_sets(["a"], 0)
