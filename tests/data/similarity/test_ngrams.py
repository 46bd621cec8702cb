"""Sets of hashed n-grams agree with sets of n-grams."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.data.records.record import fold_case, plain_words
from posttrain.data.similarity import ngrams
from posttrain.data.similarity.ngrams import (
    hash_words,
    intersections,
    jaccard,
    ngram_sequences,
    ngram_sets,
    splitmix64,
    word_runs,
)

LETTERS = "abAB. \n\t\x1c\u00a0\u2003\u0301\u00e9\u1e9e\u0130\ufb01\u6f22\U0001f600"
corpora = st.lists(st.text(LETTERS, max_size=14) | st.text("aB \n.", max_size=14), max_size=8)


def as_set(text: str, ngram: int) -> set[str]:
    folded_text = fold_case(text)
    return {folded_text[at : at + ngram] for at in range(max(1, len(folded_text) - ngram + 1))}


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(texts=corpora, ngram=st.integers(1, 9))
def test_hashed_sets_agree_with_sets_of_ngrams(texts: list[str], ngram: int) -> None:
    hashes = ngram_sets(texts, ngram)
    sets = [as_set(text, ngram) for text in texts]
    assert hashes.values.dtype == np.uint64
    assert hashes.offsets.dtype == np.int64
    assert hashes.offsets[0] == 0
    assert hashes.sizes.tolist() == [len(item) for item in sets]
    for begin, end in zip(hashes.offsets[:-1], hashes.offsets[1:], strict=True):
        assert (np.diff(hashes.values[begin:end].astype(object)) > 0).all()
    i, j = (axis.ravel() for axis in np.indices((len(texts), len(texts))))
    pairs = list(zip(i.tolist(), j.tolist(), strict=True))
    assert intersections(hashes, hashes, i, j).tolist() == [len(sets[a] & sets[b]) for a, b in pairs]
    assert jaccard(hashes, hashes, i, j).tolist() == [len(sets[a] & sets[b]) / len(sets[a] | sets[b]) for a, b in pairs]


@settings(max_examples=40, deadline=None)
@given(texts=corpora, ngram=st.integers(1, 9))
def test_a_hash_depends_only_on_its_ngram(texts: list[str], ngram: int) -> None:
    all_texts = ngram_sets(texts, ngram)
    one_by_one = [ngram_sets([text], ngram).values for text in texts]
    assert all_texts.values.tolist() == [value for item in one_by_one for value in item.tolist()]
    in_order = ngram_sequences(texts, ngram)
    for row, item in enumerate(one_by_one):
        assert np.array_equal(np.unique(in_order.values[in_order.offsets[row] : in_order.offsets[row + 1]]), item)


@settings(max_examples=40, deadline=None)
@given(texts=corpora, length=st.integers(1, 4))
def test_runs_of_words_agree_with_lists_of_words(texts: list[str], length: int) -> None:
    words = hash_words(texts)
    runs = word_runs(words, length)
    word_lists = [text.split() for text in plain_words(texts)]
    expected = [
        tuple(words_of_text[at : at + length])
        for words_of_text in word_lists
        for at in range(len(words_of_text) - length + 1)
    ]
    assert words.sizes.tolist() == [len(words_of_text) for words_of_text in word_lists]
    assert runs.sizes.tolist() == [max(0, len(words_of_text) - length + 1) for words_of_text in word_lists]
    names: dict[int, tuple[str, ...]] = {}
    assert [names.setdefault(value, run) for value, run in zip(runs.values.tolist(), expected, strict=True)] == expected
    assert len(names) == len(set(expected))


def test_blocks_and_chunks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = ["The cat sat", "on", "", "the Cat  sat on the mat", "\u00c9t\u00e9", "ete" * 50] * 3
    i, j = (axis.ravel() for axis in np.indices((len(texts), len(texts))))
    expected = ngram_sets(texts, 3)
    expected_counts = intersections(expected, expected, i, j)
    monkeypatch.setattr(ngrams, "_CHARACTERS_A_BLOCK", 7)
    monkeypatch.setattr(ngrams, "_MEMBERS_A_CHUNK", 11)
    result = ngram_sets(texts, 3)
    assert np.array_equal(result.values, expected.values)
    assert np.array_equal(result.offsets, expected.offsets)
    assert np.array_equal(intersections(result, result, i, j), expected_counts)


def test_every_bit_of_a_hash_is_balanced() -> None:
    values = ngram_sets([" ".join(str(number) for number in range(20_000))], 5).values
    ones = np.array([(values >> np.uint64(bit) & np.uint64(1)).mean() for bit in range(64)])
    assert len(values) > 50_000
    assert np.abs(ones - 0.5).max() < 5 * 0.5 / np.sqrt(len(values))


def test_splitmix64_matches_the_reference() -> None:
    # The first outputs for seed 0 of the reference implementation, whose state grows by the golden ratio.
    states = np.arange(1, 4, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    assert [hex(value) for value in splitmix64(states).tolist()] == [
        "0xe220a8397b1dcdaf",
        "0x6e789e6aa1b965f4",
        "0x6c45d188009454f",
    ]


def test_an_ngram_length_of_0_raises() -> None:
    with pytest.raises(ValueError, match="n-gram"):
        ngram_sets(["a"], 0)
