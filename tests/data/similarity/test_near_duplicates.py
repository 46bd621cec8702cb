"""Near-duplicate clusters equal brute force over all pairs, up to the miss rate of MinHash."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.data.similarity import minhash
from posttrain.data.similarity import near_duplicates as search
from posttrain.data.similarity.minhash import minhash_sketch
from posttrain.data.similarity.near_duplicates import cluster_near_duplicates, near_duplicates
from posttrain.data.steps.apply import apply_step
from posttrain.data.steps.duplicates import Minhash

pytestmark = pytest.mark.slow


def brute_force(texts: list[str], threshold: float) -> list[int]:
    """Clusters from comparing every pair and walking the connected texts."""

    def runs(text: str) -> set[str]:
        folded_text = " ".join(text.split()).casefold()
        return {folded_text[at : at + 5] for at in range(max(1, len(folded_text) - 4))}

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


@contextmanager
def exact_minhash() -> Iterator[None]:
    """Sets a miss rate of 10^-9, so that the result equals brute force."""
    minhash.banding.cache_clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(minhash, "_MISS_RATE", 1e-9)
        yield
    minhash.banding.cache_clear()


corpora = st.lists(st.text("abA \n", max_size=14), max_size=14)
thresholds = st.sampled_from([0.25, 1 / 3, 0.5, 0.6, 2 / 3, 0.75, 0.8, 0.9, 1.0])


@settings(max_examples=25, deadline=None)
@given(texts=corpora, threshold=thresholds)
def test_clusters_equal_brute_force(texts: list[str], threshold: float) -> None:
    with exact_minhash():
        assert near_duplicates(texts, threshold).tolist() == brute_force(texts, threshold)


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


@pytest.mark.parametrize("threshold", [0.5, 0.9])
def test_messages_of_ten_words(threshold: float) -> None:
    texts = messages(300)
    clusters = near_duplicates(texts, threshold)
    assert clusters.dtype == np.int64
    assert clusters.tolist() == brute_force(texts, threshold)
    assert 150 <= len(set(clusters.tolist())) < 300


def cluster_texts(
    texts: list[str], threshold: float, previous: np.ndarray | None = None, alive: np.ndarray | None = None
) -> np.ndarray:
    def fetch(rows: np.ndarray) -> list[str]:
        return [texts[row] for row in rows.tolist()]

    return cluster_near_duplicates(minhash_sketch(texts, threshold), fetch, threshold, alive, previous=previous)


@settings(max_examples=20, deadline=None)
@given(data=st.data(), texts=corpora, threshold=thresholds)
def test_incremental_search_equals_a_search_from_scratch(
    data: st.DataObject, texts: list[str], threshold: float
) -> None:
    alive = np.array(data.draw(st.lists(st.booleans(), min_size=len(texts), max_size=len(texts))), dtype=bool)
    old = data.draw(st.integers(0, len(texts)))
    previous = cluster_texts(texts[:old], threshold, alive=alive[:old])
    expected = cluster_texts(texts, threshold, alive=alive)
    assert cluster_texts(texts, threshold, previous, alive).tolist() == expected.tolist()
    assert (expected[~alive] == np.flatnonzero(~alive)).all()


@pytest.mark.parametrize("steps", [[0, 300], [1, 2, 150, 299, 300, 300]])
def test_incremental_search_over_messages(steps: list[int]) -> None:
    texts = messages(300)
    texts = [texts[row] for row in np.random.default_rng(4).permutation(300)]
    clusters = None
    for size in steps:
        clusters = cluster_texts(texts[:size], 0.6, clusters)
    np.testing.assert_array_equal(clusters, cluster_texts(texts, 0.6))


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Every pair whose similarity is computed."""
    pairs: list[tuple[int, int]] = []
    compare = search.similarities

    def record_pairs(texts: Any, i: np.ndarray, j: np.ndarray, over: Any) -> np.ndarray:
        pairs.extend(zip(i.tolist(), j.tolist(), strict=True))
        return compare(texts, i, j, over)

    monkeypatch.setattr(search, "similarities", record_pairs)
    return pairs


def test_incremental_search_compares_no_two_old_texts(compared: list[tuple[int, int]]) -> None:
    texts = messages(200)
    previous = cluster_texts(texts[:190], 0.6)
    compared.clear()
    cluster_texts(texts, 0.6, previous)
    assert compared
    assert all(max(pair) >= 190 for pair in compared)


def test_clusters_do_not_depend_on_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = messages(120)
    expected = near_duplicates(texts, 0.6)
    monkeypatch.setattr(minhash, "_CHARACTERS_A_PIECE", 1000)
    monkeypatch.setattr(search, "_ROWS_A_BLOCK", 17)
    monkeypatch.setattr(search, "_PAIRS_A_BLOCK", 20)
    monkeypatch.setattr(search, "_PAIRS_AN_ITEM", 3)
    np.testing.assert_array_equal(near_duplicates(texts, 0.6), expected)
    np.testing.assert_array_equal(cluster_texts(texts, 0.6, cluster_texts(texts[:70], 0.6)), cluster_texts(texts, 0.6))


def test_many_similar_texts_are_not_compared_pairwise(compared: list[tuple[int, int]]) -> None:
    text = "a message that is sent again and again with nothing but a number at its end, please ignore it: "
    texts = [f"{text}{number}" for number in range(1500)]
    assert not near_duplicates(texts).any()
    assert len(compared) < 3 * len(texts)


def template_texts(count: int, fresh: float, num_words: int = 40, seed: int = 0) -> list[str]:
    """Texts of one template in which a run of ``fresh`` to twice ``fresh`` of the words is sampled again."""
    draws = np.random.default_rng(seed)
    vocabulary = ["".join(draws.choice(list("abcdefghij"), size=6)) for _ in range(400)]
    template = list(draws.choice(vocabulary, size=num_words))
    texts = []
    for _ in range(count):
        length = int(draws.integers(round(fresh * num_words), round(2 * fresh * num_words) + 1))
        start = int(draws.integers(num_words - length + 1))
        texts.append(" ".join([*template[:start], *draws.choice(vocabulary, length), *template[start + length :]]))
    return texts


@pytest.mark.parametrize(("fresh", "threshold"), [(0.03, 0.8), (0.2, 0.6)])
def test_texts_of_one_template(threshold: float, fresh: float) -> None:
    texts = template_texts(70, fresh) + template_texts(50, fresh, seed=1) + messages(20)
    assert near_duplicates(texts, threshold).tolist() == brute_force(texts, threshold)


def test_incremental_search_over_texts_of_one_template() -> None:
    texts = template_texts(200, 0.07)
    texts = [texts[row] for row in np.random.default_rng(1).permutation(len(texts))]
    expected = cluster_texts(texts, 0.8)
    assert 1 < len(set(expected.tolist())) < 200
    alive = np.arange(200) % 7 > 0
    np.testing.assert_array_equal(cluster_texts(texts, 0.8, cluster_texts(texts[:40], 0.8)), expected)
    subset = cluster_texts(texts, 0.8, alive=alive)
    np.testing.assert_array_equal(
        cluster_texts(texts, 0.8, cluster_texts(texts[:40], 0.8, alive=alive[:40]), alive), subset
    )


def test_rows_known_to_be_alone_are_not_compared(compared: list[tuple[int, int]]) -> None:
    texts = messages(200)
    expected = near_duplicates(texts)
    alone = np.bincount(expected, minlength=200)[expected] == 1
    compared.clear()
    sketches, fetch = minhash_sketch(texts), lambda rows: [texts[row] for row in rows.tolist()]
    np.testing.assert_array_equal(cluster_near_duplicates(sketches, fetch, alone=alone), expected)
    assert compared
    assert not any(alone[list(pair)].any() for pair in compared)


def test_few_near_duplicates_among_many_texts_of_one_template(compared: list[tuple[int, int]]) -> None:
    """Of 2,000 texts at a similarity of about 0.72 only 50 copies with one typo join their originals."""
    draws = np.random.default_rng(5)
    template = "".join(draws.choice(list("abcdefghij "), size=500))
    texts = [template + "".join(draws.choice(list("klmnopqrst"), size=100)) for _ in range(2000)]
    copies = draws.permutation(2000)[:50]
    texts += [texts[row][:250] + "?" + texts[row][250:] for row in copies]
    assert near_duplicates(texts).tolist() == [*range(2000), *copies.tolist()]
    # Linear in the number of texts: no text is compared with more than 16 earlier ones.
    assert len(compared) <= 16 * len(texts)


def test_no_false_pairs_and_at_most_1_percent_missing() -> None:
    texts = messages(400)
    clusters, truth = near_duplicates(texts, 0.8), np.array(brute_force(texts, 0.8))
    result_pairs, true_pairs = (labels[:, None] == labels for labels in (clusters, truth))
    assert not (result_pairs & ~true_pairs).any()
    assert (true_pairs & ~result_pairs).sum() <= 0.01 * true_pairs.sum()


def test_clusters_follow_a_permutation() -> None:
    texts = messages(200)
    order = np.random.default_rng(0).permutation(len(texts))
    ordered = near_duplicates(texts, 0.6)
    shuffled = near_duplicates([texts[row] for row in order], 0.6)
    as_sets = [
        {frozenset(rows[clusters == name].tolist()) for name in set(clusters.tolist())}
        for rows, clusters in ((np.arange(len(texts)), ordered), (order, shuffled))
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
def test_empty_and_very_short_texts(texts: list[str]) -> None:
    assert near_duplicates(texts, 0.8).tolist() == [0, 0, 2][: len(texts)]


@pytest.mark.parametrize("threshold", [0.0, -1.0, 1.1])
def test_a_threshold_outside_its_range_raises(threshold: float) -> None:
    with pytest.raises(ValueError, match="threshold"):
        near_duplicates(["a"], threshold)


def test_near_duplicates_with_different_answers_stay(make: Callable[..., pa.Table]) -> None:
    text = "please tell me where my parcel is right now"
    table = make((text, "a"), (text + ".", "b"), (text + "!", "a"), ("something else entirely", "a"))
    outcome = apply_step(Minhash(), table)
    assert outcome.kept["line"].to_pylist() == [1, 2, 4]
    assert [(row["line"], row["reason"], row["detail"]) for row in outcome.rejected.to_pylist()] == [
        (3, "near duplicate", "similarity 0.97 to f:1")
    ]


@pytest.mark.parametrize(("texts", "message"), [("abc", "not one text"), (["a", None], r"texts\[1\] is NoneType")])
def test_an_argument_other_than_a_list_of_texts_raises(texts: object, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        near_duplicates(texts)  # type: ignore[arg-type]
