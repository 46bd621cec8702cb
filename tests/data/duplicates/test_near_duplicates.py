"""Near duplicates are what brute force over all pairs finds, less what MinHash may miss."""

from collections.abc import Callable, Iterator

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.data.duplicates import all_pairs, buckets, minhash
from posttrain.data.duplicates import near_duplicates as search
from posttrain.data.duplicates.minhash import minhash_sketch
from posttrain.data.duplicates.near_duplicates import cluster_near_duplicates, near_duplicates
from posttrain.data.steps.apply import apply_step
from posttrain.data.steps.duplicates import Minhash

pytestmark = pytest.mark.slow


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


@pytest.fixture(scope="module")
def sure() -> Iterator[None]:
    """MinHash that misses one pair in 10^9, so that what it finds can be compared with all there is."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(minhash, "_MISS_RATE", 1e-9)
        minhash.banding.cache_clear()
        yield
    minhash.banding.cache_clear()


corpora = st.lists(st.text("abA \n", max_size=14), max_size=14)
thresholds = st.sampled_from([0.25, 1 / 3, 0.5, 0.6, 2 / 3, 0.75, 0.8, 0.9, 1.0])


@settings(max_examples=60, deadline=None)
@given(texts=corpora, threshold=thresholds, ngram=st.integers(1, 5))
@pytest.mark.usefixtures("sure")
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


def found(
    texts: list[str], threshold: float, known: np.ndarray | None = None, alive: np.ndarray | None = None
) -> np.ndarray:
    def fetch(rows: np.ndarray) -> list[str]:
        return [texts[row] for row in rows.tolist()]

    return cluster_near_duplicates(minhash_sketch(texts, threshold, 3), fetch, threshold, 3, alive, known)


@settings(max_examples=50, deadline=None)
@given(data=st.data(), texts=corpora, threshold=thresholds)
def test_growing_gives_what_a_search_from_scratch_gives(
    data: st.DataObject, texts: list[str], threshold: float
) -> None:
    alive = np.array(data.draw(st.lists(st.booleans(), min_size=len(texts), max_size=len(texts))), dtype=bool)
    old = data.draw(st.integers(0, len(texts)))
    known = found(texts[:old], threshold, alive=alive[:old])
    whole = found(texts, threshold, alive=alive)
    assert found(texts, threshold, known, alive).tolist() == whole.tolist()
    assert (whole[~alive] == np.flatnonzero(~alive)).all()


@pytest.mark.parametrize("steps", [[0, 300], [200, 300], [1, 2, 150, 299, 300], [300, 300]])
def test_growing_by_messages(steps: list[int]) -> None:
    texts = messages(300)
    texts = [texts[row] for row in np.random.default_rng(4).permutation(300)]
    known = None
    for size in steps:
        known = found(texts[:size], 0.6, known)
    np.testing.assert_array_equal(known, found(texts, 0.6))


def test_growing_compares_no_two_old_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = messages(200)
    known = found(texts[:190], 0.6)
    seen: list[tuple[int, int]] = []
    compare = search._similarities

    def noted(i: np.ndarray, j: np.ndarray, **rest: object) -> np.ndarray:
        seen.extend(zip(i.tolist(), j.tolist(), strict=True))
        return compare(i, j, **rest)

    monkeypatch.setattr(search, "_similarities", noted)
    found(texts, 0.6, known)
    assert seen
    assert all(max(pair) >= 190 for pair in seen)


def test_clusters_do_not_depend_on_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = messages(120)
    whole = near_duplicates(texts, 0.6)
    monkeypatch.setattr(minhash, "_CHARACTERS_A_PIECE", 1000)
    monkeypatch.setattr(search, "_PAIRS_A_LIST", 7)
    monkeypatch.setattr(search, "_PAIRS_A_BLOCK", 20)
    monkeypatch.setattr(search, "_PAIRS_AN_ITEM", 3)
    monkeypatch.setattr(search, "_LEADING_BITS", 2)
    np.testing.assert_array_equal(near_duplicates(texts, 0.6), whole)
    np.testing.assert_array_equal(found(texts, 0.6, found(texts[:70], 0.6)), found(texts, 0.6))


def test_many_alike_do_not_cost_all_their_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "a message that is sent again and again with nothing but a number at its end, please ignore it: "
    texts = [f"{text}{number}" for number in range(1500)]
    compared = 0
    compare = search._similarities

    def counted(i: np.ndarray, j: np.ndarray, **rest: object) -> np.ndarray:
        nonlocal compared
        compared += len(i)
        return compare(i, j, **rest)

    monkeypatch.setattr(search, "_similarities", counted)
    assert not near_duplicates(texts).any()
    assert compared < 3 * len(texts)


def templated(count: int, fresh: float, words: int = 40, seed: int = 0) -> list[str]:
    """Texts of one template in which a stretch of up to twice this share of the words is drawn anew."""
    draws = np.random.default_rng(seed)
    vocabulary = ["".join(draws.choice(list("abcdefghij"), size=6)) for _ in range(400)]
    template = list(draws.choice(vocabulary, size=words))
    texts = []
    for _ in range(count):
        length = int(draws.integers(round(fresh * words), round(2 * fresh * words) + 1))
        start = int(draws.integers(words - length + 1))
        texts.append(" ".join([*template[:start], *draws.choice(vocabulary, length), *template[start + length :]]))
    return texts


@pytest.fixture
def crowded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few texts are a crowd, and a crowd is cut into parts."""
    monkeypatch.setattr(buckets, "_PAIRS_OF_DENSE_BUCKET", 300)
    monkeypatch.setattr(all_pairs, "_MOST_ROWS", 50)
    monkeypatch.setattr(all_pairs, "_ROWS_A_BLOCK", 16)


@pytest.mark.parametrize(("fresh", "threshold"), [(0.03, 0.8), (0.09, 0.8), (0.12, 0.8), (0.2, 0.6)])
@pytest.mark.usefixtures("sure", "crowded")
def test_texts_of_one_template(threshold: float, fresh: float) -> None:
    texts = templated(70, fresh) + templated(50, fresh, seed=1) + messages(20)
    assert near_duplicates(texts, threshold).tolist() == brute_force(texts, threshold, 5)


@settings(max_examples=30, deadline=None)
@given(texts=st.lists(st.text("ab ", min_size=8, max_size=30), min_size=10, max_size=40), threshold=thresholds)
@pytest.mark.usefixtures("sure")
def test_texts_of_few_letters(texts: list[str], threshold: float) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(buckets, "_PAIRS_OF_DENSE_BUCKET", 20)
        assert near_duplicates(texts, threshold, 2).tolist() == brute_force(texts, threshold, 2)


@pytest.mark.parametrize("size", [1, 40, 199])
@pytest.mark.usefixtures("crowded")
def test_growing_by_texts_of_one_template(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = templated(200, 0.12)
    texts = [texts[row] for row in np.random.default_rng(1).permutation(len(texts))]
    whole = found(texts, 0.8)
    assert 1 < len(set(whole.tolist())) < 200
    alive = np.arange(200) % 7 > 0
    np.testing.assert_array_equal(found(texts, 0.8, found(texts[:size], 0.8)), whole)
    subset = found(texts, 0.8, alive=alive)
    np.testing.assert_array_equal(found(texts, 0.8, found(texts[:size], 0.8, alive=alive[:size]), alive), subset)
    monkeypatch.setattr(buckets, "_PAIRS_OF_DENSE_BUCKET", 1 << 40)
    np.testing.assert_array_equal(found(texts, 0.8), whole)
    np.testing.assert_array_equal(found(texts, 0.8, alive=alive), subset)


def test_a_crowd_in_which_hardly_two_are_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """2,000 texts at a similarity of 0.72 or so, and in them 50 texts with one typo in another: only those join."""
    draws = np.random.default_rng(5)
    template = "".join(draws.choice(list("abcdefghij "), size=500))
    texts = [template + "".join(draws.choice(list("klmnopqrst"), size=100)) for _ in range(2000)]
    copies = draws.permutation(2000)[:50]
    texts += [texts[row][:250] + "?" + texts[row][250:] for row in copies]
    compared = 0
    compare = search._similarities

    def counted(i: np.ndarray, j: np.ndarray, **rest: object) -> np.ndarray:
        nonlocal compared
        compared += len(i)
        return compare(i, j, **rest)

    monkeypatch.setattr(search, "_similarities", counted)
    assert near_duplicates(texts).tolist() == [*range(2000), *copies.tolist()]
    assert compared < 10 * len(texts)


def test_a_large_crowd_is_told_of(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(buckets, "_PAIRS_OF_DENSE_BUCKET", 10)
    monkeypatch.setattr(search, "_ROWS_TO_WARN", 100)
    near_duplicates(templated(150, 0.09))
    assert "texts are almost alike" in caplog.text


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_hardly_a_pair_is_missed_and_none_is_invented(seed: int) -> None:
    texts = messages(400)
    clusters, truth = near_duplicates(texts, 0.8, seed=seed), np.array(brute_force(texts, 0.8, 5))
    ours, theirs = (names[:, None] == names for names in (clusters, truth))
    assert not (ours & ~theirs).any()
    assert (theirs & ~ours).sum() <= 0.01 * theirs.sum()


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
    kept, rejected, *_ = apply_step(Minhash(), table)
    assert kept["line"].to_pylist() == [1, 2, 4]
    assert [(row["line"], row["reason"], row["detail"]) for row in rejected.to_pylist()] == [
        (3, "near duplicate", "similarity 0.97 to f:1")
    ]


@pytest.mark.parametrize(("texts", "message"), [("abc", "not one text"), (["a", None], r"texts\[1\] is NoneType")])
def test_what_is_no_list_of_texts_is_said(texts: object, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        near_duplicates(texts)  # type: ignore[arg-type]
