"""Near duplicates are exactly what brute force over all pairs finds."""

from collections.abc import Callable

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.data import similarity
from posttrain.data.near_duplicates import near_duplicate_records, near_duplicates


def brute_force(texts: list[str], threshold: float, ngram: int) -> list[int]:
    """Clusters by comparing every pair and walking what is connected."""

    def runs(text: str) -> set[str]:
        folded = " ".join(text.split()).casefold()
        return {folded[at : at + ngram] for at in range(max(1, len(folded) - ngram + 1))}

    sets = [runs(text) for text in texts]
    clusters = [-1] * len(texts)
    for start in range(len(texts)):
        front = [start] if clusters[start] < 0 else []
        while front:
            row = front.pop()
            clusters[row] = start
            front += [
                other
                for other in range(len(texts))
                if clusters[other] < 0 and len(sets[row] & sets[other]) / len(sets[row] | sets[other]) >= threshold
            ]
    return clusters


corpora = st.lists(st.text("abA \n", max_size=14), max_size=14)
thresholds = st.sampled_from([0.1, 0.25, 1 / 3, 0.5, 0.6, 2 / 3, 0.75, 0.8, 0.9, 1.0])


@settings(max_examples=300, deadline=None)
@given(texts=corpora, threshold=thresholds, ngram=st.integers(1, 5))
def test_clusters_equal_brute_force(texts: list[str], threshold: float, ngram: int) -> None:
    assert near_duplicates(texts, threshold, ngram).tolist() == brute_force(texts, threshold, ngram)


def messages(count: int) -> list[str]:
    draws = np.random.default_rng(3)
    vocabulary = ["".join(draws.choice(list("abcdefgh"), size=length)) for length in draws.integers(2, 9, size=150)]
    texts = [" ".join(draws.choice(vocabulary, size=10)) for _ in range(count // 2)]
    for text in list(texts):
        letters = list(text)
        for _ in range(int(draws.integers(0, 4))):
            letters[int(draws.integers(len(letters)))] = "x"
        texts.append("".join(letters))
    return texts


@pytest.mark.parametrize("threshold", [0.5, 0.8, 0.9])
def test_messages_of_ten_words(threshold: float) -> None:
    texts = messages(300)
    clusters = near_duplicates(texts, threshold)
    assert clusters.dtype == np.int64
    assert clusters.tolist() == brute_force(texts, threshold, 5)
    assert 150 <= len(set(clusters.tolist())) < 300


def test_clusters_do_not_depend_on_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = messages(200)
    whole = near_duplicates(texts, 0.6)
    monkeypatch.setattr(similarity, "_MEETINGS_A_BLOCK", 7)
    monkeypatch.setattr(similarity, "_PAIRS_A_CHUNK", 3)
    np.testing.assert_array_equal(near_duplicates(texts, 0.6), whole)


def test_clusters_follow_a_permutation() -> None:
    texts = messages(200)
    order = np.random.default_rng(0).permutation(len(texts))
    straight = near_duplicates(texts, 0.6)
    mixed = near_duplicates([texts[row] for row in order], 0.6)
    as_sets = [
        {frozenset(rows[clusters == name].tolist()) for name in set(clusters.tolist())}
        for rows, clusters in ((np.arange(len(texts)), straight), (order, mixed))
    ]
    assert as_sets[0] == as_sets[1]


def test_a_typo_in_a_short_message_is_found() -> None:
    texts = [
        "I am still waiting on my new card, when will it arrive?",
        "My payment was declined at the supermarket",
        "I am still waiting on my new crad, when will it arrive?",
        "i am  STILL waiting on my new card, when will it arrive",
    ]
    assert near_duplicates(texts, 0.75).tolist() == [0, 1, 0, 0]
    assert near_duplicates(texts, 1.0).tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("texts", [[], [""], ["", " ", "a"]])
def test_hardly_any_text(texts: list[str]) -> None:
    assert near_duplicates(texts, 0.8).tolist() == [0, 0, 2][: len(texts)]


@pytest.mark.parametrize("threshold", [0.0, -1.0, 1.1])
def test_a_threshold_outside_its_range(threshold: float) -> None:
    with pytest.raises(ValueError, match="threshold"):
        near_duplicates(["a"], threshold)


def test_like_inputs_with_different_answers_stay(make: Callable[..., pa.Table]) -> None:
    text = "please tell me where my parcel is right now"
    table = make((text, "a"), (text + ".", "b"), (text + "!", "a"), ("something else entirely", "a"))
    kept, rejected, *_ = near_duplicate_records(0.8)(table)
    assert kept["line"].to_pylist() == [1, 2, 4]
    assert [(row["line"], row["reason"], row["detail"]) for row in rejected.to_pylist()] == [
        (3, "near duplicate", "in one cluster with f:1")
    ]
