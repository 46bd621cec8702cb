"""all_pairs finds the pairs that comparing every two sets finds."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.data.duplicates import all_pairs as module
from posttrain.data.duplicates.all_pairs import all_pairs

Pairs = set[tuple[int, int]]
NGRAM = 3


def sets_of(texts: list[str]) -> list[set[str]]:
    normalised = [" ".join(text.split()) for text in texts]
    return [{text[at : at + NGRAM] for at in range(max(1, len(text) - NGRAM + 1))} for text in normalised]


def brute_force(texts: list[str], rows: list[int], new: list[bool], cluster: np.ndarray, threshold: float) -> Pairs:
    sets = sets_of(texts)
    return {
        (min(a, b), max(a, b))
        for position, a in enumerate(rows)
        for other_position, b in enumerate(rows[:position])
        if (new[position] or new[other_position])
        and cluster[a] != cluster[b]
        and len(sets[a] & sets[b]) / len(sets[a] | sets[b]) >= threshold
    }


def search_pairs(texts: list[str], rows: list[int], new: list[bool], cluster: np.ndarray, threshold: float) -> Pairs:
    blocks = all_pairs(
        np.array(rows),
        np.array(new, dtype=bool),
        cluster,
        lambda block: [texts[row] for row in block.tolist()],
        threshold,
        NGRAM,
        map,
    )
    pairs = [pair for i, j in blocks for pair in zip(i.tolist(), j.tolist(), strict=True)]
    return {(min(pair), max(pair)) for pair in pairs}


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(
    data=st.data(),
    texts=st.lists(st.text("ab ", max_size=25), min_size=1, max_size=25),
    threshold=st.sampled_from([0.25, 1 / 3, 0.5, 2 / 3, 0.75, 0.8, 1.0]),
    height=st.sampled_from([3, 10, 100]),
    dense=st.sampled_from([0.0, 0.3, 1.0]),
)
def test_all_pairs_equal_brute_force(
    data: st.DataObject, texts: list[str], threshold: float, height: int, dense: float
) -> None:
    rows = data.draw(st.permutations(range(len(texts))).map(lambda order: order[: max(1, len(order) - 2)]))
    new = data.draw(st.lists(st.booleans(), min_size=len(rows), max_size=len(rows)))
    # All old rows are in one cluster if they are alike; here any clusters do.
    cluster = np.array(data.draw(st.lists(st.integers(0, 5), min_size=len(texts), max_size=len(texts))))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_MOST_ROWS", height)
        patch.setattr(module, "_ROWS_A_BLOCK", 2)
        patch.setattr(module, "_TEXTS_A_SAMPLE", 4)
        patch.setattr(module, "_TEXTS_A_FETCH", 3)
        patch.setattr(module, "_CHARACTERS_AN_ITEM", 20)
        patch.setattr(module, "_DENSE", dense)
        assert search_pairs(texts, rows, new, cluster, threshold) >= brute_force(texts, rows, new, cluster, threshold)
        pairs_of_new_rows = search_pairs(texts, rows, [True] * len(rows), np.arange(len(texts)), threshold)
    assert pairs_of_new_rows == brute_force(texts, rows, [True] * len(rows), np.arange(len(texts)), threshold)
    assert search_pairs(texts, rows, new, cluster, threshold) <= pairs_of_new_rows


@pytest.mark.parametrize("cells", [0, 1 << 25])
def test_pairs_just_at_and_just_below_the_threshold(cells: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts of 400 n-grams are windows of one text of 5,000; the distance of two starts sets their similarity."""
    monkeypatch.setattr(module, "_MOST_CELLS", cells)
    unit = "".join(chr(0x4E00 + position) for position in range(5402))
    starts = [0, 44, 45, 4000, 4040, 4085]
    texts = [unit[start : start + 402] for start in starts]
    # 356 shared of 444 are 0.8018, 355 of 445 are 0.7978.
    assert search_pairs(texts, [*range(6)], [True] * 6, np.arange(6), 356 / 444) == {(0, 1), (1, 2), (3, 4)}


def test_rows_that_join_a_cluster_are_not_compared_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_ROWS_A_BLOCK", 10)
    texts = [f"one template whose texts are alike but for a number like {number}" for number in range(300)]
    cluster = np.arange(300)
    blocks = 0
    for _ in all_pairs(
        cluster.copy(),
        np.ones(300, dtype=bool),
        cluster,
        lambda rows: [texts[row] for row in rows.tolist()],
        0.8,
        NGRAM,
        map,
    ):
        cluster[:] = 0
        blocks += 1
    assert blocks == 1
