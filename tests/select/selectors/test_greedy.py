"""Lazy greedy coverage, against plain greedy and the optimum."""

from itertools import combinations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from posttrain.select.selectors import greedy
from posttrain.select.selectors.greedy import greedy_cover, marginal_relevance
from posttrain.select.selectors.registry import select


def plain_greedy(similarity: np.ndarray, n: int, before: np.ndarray) -> list[int]:
    covered, chosen = before.astype(np.float64), []
    for _ in range(min(n, len(similarity))):
        gains = np.maximum(similarity - covered, 0).sum(axis=1)
        best = int(np.argmax(gains))
        if gains[best] <= 0:
            break
        chosen.append(best)
        covered = np.maximum(covered, similarity[best])
    return chosen


@settings(max_examples=25)
@given(rows=st.integers(1, 150), columns=st.integers(1, 40), n=st.integers(1, 40), seed=st.integers(0, 99))
def test_lazy_greedy_equals_plain_greedy(rows: int, columns: int, n: int, seed: int) -> None:
    generator = np.random.default_rng(seed)
    similarity = generator.integers(0, 8, (rows, columns)).astype(np.float32)  # sums are exact, and often the same
    before = generator.integers(0, 3, columns).astype(np.float32)
    assert greedy_cover(similarity, n, before).tolist() == plain_greedy(similarity, n, before)


def plain_marginal_relevance(points: np.ndarray, before: np.ndarray, worth: np.ndarray, n: int) -> list[int]:
    chosen: list[int] = []
    while len(chosen) < n:
        others = np.concatenate([before, points[chosen]])
        values = worth - ((points @ others.T).max(axis=1) if len(others) else 0)
        values[chosen] = -np.inf
        chosen.append(int(values.argmax()))
    return chosen


@pytest.mark.parametrize("front", [1, 7, 4096])
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rows=st.integers(1, 150), before=st.integers(0, 3), share=st.floats(0, 1), seed=st.integers(0, 99))
def test_lazy_marginal_relevance_equals_plain(
    monkeypatch: pytest.MonkeyPatch, front: int, rows: int, before: int, share: float, seed: int
) -> None:
    monkeypatch.setattr(greedy, "_FRONT", front)
    generator = np.random.default_rng(seed)
    # Products are exact, and values often the same.
    points, labelled = (generator.integers(-2, 3, (count, 3)).astype(np.float32) for count in (rows, before))
    worth, n = generator.integers(0, 5, rows).astype(np.float32), max(1, round(share * rows))
    expected = plain_marginal_relevance(points, labelled, worth, n)
    assert marginal_relevance(points, labelled, worth, np.float32(1), n).tolist() == expected


@pytest.mark.parametrize("seed", range(10))
def test_greedy_coverage_is_close_to_the_optimum(seed: int) -> None:
    similarity = np.random.default_rng(seed).random((12, 20)).astype(np.float32)
    gain = similarity[greedy_cover(similarity, 4, np.zeros(20, np.float32))].max(axis=0).sum()
    optimum = max(similarity[list(rows)].max(axis=0).sum() for rows in combinations(range(12), 4))
    assert (1 - 1 / np.e) * optimum <= gain <= optimum * (1 + 1e-6)
    assert gain > 0.9 * optimum  # greedy is nearly always much better than its bound


def test_facility_location_of_few_rows_is_exact() -> None:
    embeddings = np.random.default_rng(2).normal(size=(60, 5))
    unit = embeddings / np.linalg.norm(embeddings, axis=1, keepdims=True)
    labelled = np.arange(60) < 4
    chosen = select("facility_location", {"embeddings": embeddings}, 10, 0, labelled, dimensions=None)
    similarity = (1 + unit @ unit.T) / 2
    expected = plain_greedy(similarity[4:], 10, similarity[:4].max(axis=0))
    assert chosen.tolist() == [row + 4 for row in expected]


def test_facility_location_on_a_sample_covers_nearly_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = np.random.default_rng(3)
    embeddings = generator.normal(size=(2000, 6)) + generator.normal(size=(25, 6))[generator.integers(0, 25, 2000)] * 3
    unit = embeddings / np.linalg.norm(embeddings, axis=1, keepdims=True)

    def mean_similarity(rows: int) -> float:
        scores = {"embeddings": embeddings}
        monkeypatch.setattr(greedy, "MAX_GROUND", rows)
        monkeypatch.setattr(greedy, "MAX_CANDIDATES", rows)
        chosen = select("facility_location", scores, 20, dimensions=None)
        return float((unit @ unit[chosen].T).max(axis=1).mean())

    assert mean_similarity(400) > 0.97 * mean_similarity(2000)
