"""Samples by squared distance have exactly the probabilities of k-means++."""

import numpy as np
import pytest

from posttrain.select.selectors import badge
from posttrain.select.selectors.badge import draw_by_squared_distance
from posttrain.select.selectors.similarity import Euclidean

POINTS = np.array([[0.0], [1.0], [3.0], [3.5], [7.0], [7.0]], np.float32)
WEIGHTS = np.array([1.0, 2.0, 1.0, 0.0, 1.0, 0.5])


def probabilities() -> dict[tuple[int, int, int], float]:
    """The probability of every sample of three, by the definition."""
    squares = (POINTS - POINTS.T) ** 2
    result = {}
    for first in np.flatnonzero(WEIGHTS):
        second_odds = WEIGHTS * squares[first]
        for second in np.flatnonzero(second_odds):
            third_odds = WEIGHTS * np.minimum(squares[first], squares[second])
            for third in np.flatnonzero(third_odds):
                chance = WEIGHTS[first] / WEIGHTS.sum() * second_odds[second] / second_odds.sum()
                result[int(first), int(second), int(third)] = chance * third_odds[third] / third_odds.sum()
    return result


@pytest.mark.slow
@pytest.mark.parametrize("proposals", [1, 64])
def test_draws_have_the_probabilities_of_k_means_plus_plus(proposals: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(badge, "_PROPOSALS", proposals)
    draws, similarity = 2_000, Euclidean.from_rows(POINTS)
    counts: dict[tuple[int, ...], int] = {}
    for seed in range(draws):
        sample = tuple(draw_by_squared_distance(similarity, 3, np.random.default_rng(seed), WEIGHTS).tolist())
        counts[sample] = counts.get(sample, 0) + 1
    exact = probabilities()
    assert sum(exact.values()) == pytest.approx(1)
    assert set(counts) <= set(exact)
    expected = np.array([exact[key] * draws for key in exact])
    actual = np.array([counts.get(key, 0) for key in exact])
    statistic = ((actual - expected) ** 2 / expected).sum()
    freedom = len(exact) - 1
    assert abs(statistic - freedom) < 5 * np.sqrt(2 * freedom)


def test_duplicate_rows_come_after_all_different_rows() -> None:
    points = np.repeat(np.eye(3, dtype=np.float32), 4, axis=0)
    for seed in range(20):
        sample = draw_by_squared_distance(Euclidean.from_rows(points), 12, np.random.default_rng(seed), np.ones(12))
        assert sorted(sample.tolist()) == list(range(12))
        assert len({tuple(points[row]) for row in sample[:3]}) == 3


def test_many_draws_need_few_passes() -> None:
    generator = np.random.default_rng(0)
    points = generator.normal(size=(5000, 32)).astype(np.float32)
    sizes: list[int] = []

    class CountingEuclidean(Euclidean):
        def between(self, rows, others):  # type: ignore[no-untyped-def]
            result = super().between(rows, others)
            sizes.append(result.size)
            return result

    euclidean = CountingEuclidean(points, Euclidean.from_rows(points).halves)
    sample = draw_by_squared_distance(euclidean, 300, generator, np.ones(5000))
    assert len(set(sample.tolist())) == 300
    assert sum(sizes) < 1.5 * 5000 * 300
    assert len(sizes) < 150
