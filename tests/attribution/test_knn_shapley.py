"""Shapley values of nearest neighbours, against the definition over all sets, with ties."""

import math
from itertools import combinations, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.attribution.knn_shapley import knn_shapley


def votes(right: np.ndarray, distances: np.ndarray, rows: np.ndarray, k: int) -> float:
    """Expected share of right votes of the k nearest rows, where ties are broken at random."""
    expected, remaining = 0.0, k
    for distance in np.unique(distances[rows]):
        ties = rows[distances[rows] == distance]
        count = min(remaining, len(ties))
        expected += count * right[ties].mean()
        remaining -= count
    return expected / k


def brute_force(features: np.ndarray, labels: np.ndarray, records: np.ndarray, true: np.ndarray, k: int) -> np.ndarray:
    """Shapley values by the definition, record by record and set by set."""
    count = len(labels)
    values = np.zeros(count)
    for record, label in zip(records, true, strict=True):
        distances, right = ((features - record) ** 2).sum(axis=1), (labels == label).astype(float)
        for player, size in product(range(count), range(count)):
            others = [row for row in range(count) if row != player]
            weight = math.factorial(size) * math.factorial(count - size - 1) / math.factorial(count)
            for chosen in combinations(others, size):
                before = np.array(chosen, dtype=np.int64)
                gain = votes(right, distances, np.append(before, player), k) - votes(right, distances, before, k)
                values[player] += weight * gain / len(true)
    return values


@settings(max_examples=30)
@given(st.integers(0, 10**6), st.integers(3, 5), st.integers(1, 4), st.sampled_from([2, 3, 1000]))
def test_it_equals_brute_force_with_ties(seed: int, count: int, k: int, grid: int) -> None:
    generator = np.random.default_rng(seed)
    features, records = generator.integers(0, grid, (count, 1)), generator.integers(0, grid, (4, 1))
    labels, true = generator.permutation(np.append(generator.integers(0, 3, count - 3), range(3))), np.arange(4) % 3
    result = knn_shapley(features, labels, records, true, neighbours=k)
    expected = brute_force(features.astype(float), labels, records.astype(float), true, k)
    np.testing.assert_allclose(result, expected, atol=1e-12)


def test_tied_rows_of_different_labels_share_the_value() -> None:
    """With p the share of label 0, a set of rows at one distance gets (2 p + 1 - p) / 3 votes right, and none gets 0.

    The row of label 0 raises p by 1, 1/2 or 1/3 when it comes first, second or last, by 11/18 in the mean.
    """
    rows, records = np.zeros((3, 1)), np.array([[1.0], [5.0], [5.0]])
    result = knn_shapley(rows, np.array([0, 1, 1]), records, np.array([0, 0, 1]), neighbours=1)
    of_other_label = 1 / 3 * 1 / 3 + 1 / 3 * (1 / 3 - 11 / 18) / 2
    np.testing.assert_allclose(result, [1 / 3 * 1 / 3 + 1 / 3 * 11 / 18, of_other_label, of_other_label])


def test_equal_rows_have_equal_values() -> None:
    generator = np.random.default_rng(0)
    rows = generator.normal(size=(20, 50))
    features = np.concatenate([rows, rows[::-1], rows])
    labels = np.concatenate([np.arange(20) % 2, np.arange(20)[::-1] % 2, np.arange(20) % 2])
    result = knn_shapley(features, labels, generator.normal(size=(30, 50)), np.arange(30) % 2, neighbours=4)
    np.testing.assert_allclose(result[:20], result[40:], atol=1e-15)
    np.testing.assert_allclose(result[:20], result[20:40][::-1], atol=1e-15)
    assert len(np.unique(result.round(12))) > 15


def test_values_of_many_blocks_sum_to_the_full_score(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = np.random.default_rng(1)
    features, records = generator.normal(size=(200, 4)), generator.normal(size=(57, 4))
    labels, true = np.arange(200) % 5, np.arange(57) % 5
    whole = knn_shapley(features, labels, records, true, neighbours=7)
    distances = ((records[:, None] - features) ** 2).sum(axis=2)
    everyone = [votes(labels == label, row, np.arange(200), 7) for row, label in zip(distances, true, strict=True)]
    np.testing.assert_allclose(whole.sum(), np.mean(everyone), rtol=1e-12)
    monkeypatch.setattr("posttrain.attribution.knn_shapley._BLOCK_PAIRS", 2000)
    np.testing.assert_allclose(knn_shapley(features, labels, records, true, neighbours=7), whole, atol=1e-15)


def test_wrong_labels_have_the_lowest_negative_values() -> None:
    generator = np.random.default_rng(2)
    labels = np.arange(100) % 2
    features = generator.normal(size=(100, 2)) + 6 * labels[:, None]
    wrong_labels = labels.copy()
    wrong_labels[[3, 40, 77]] = 1 - wrong_labels[[3, 40, 77]]
    records = generator.normal(size=(100, 2)) + 6 * labels[:, None]
    result = knn_shapley(features, wrong_labels, records, labels)
    assert set(np.argsort(result)[:3]) == {3, 40, 77}
    assert (result[[3, 40, 77]] < 0).all()
