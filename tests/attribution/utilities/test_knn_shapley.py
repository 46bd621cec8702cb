"""Shapley values of nearest neighbours, against the definition over all sets, with ties."""

import math
from itertools import combinations, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.attribution import KNNUtility, knn_shapley, shapley


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
    labels, true = generator.permutation(np.append(generator.integers(0, 3, count - 3), range(3))), [0, 1, 2, 0]
    result = knn_shapley(features, labels, records, true, neighbours=k)
    expected = brute_force(features.astype(float), labels, records.astype(float), np.array(true), k)
    np.testing.assert_allclose(result.values, expected, atol=1e-12)
    assert result.evaluations == 0
    assert not result.standard_errors.any()


def test_tied_rows_of_different_labels_share_the_value() -> None:
    """With p the share of label 0, a set of rows at one distance gets (2 p + 1 - p) / 3 votes right, and none gets 0.

    The row of label 0 raises p by 1, 1/2 or 1/3 when it comes first, second or last, by 11/18 in the mean.
    """
    result = knn_shapley([[0.0], [0.0], [0.0]], [0, 1, 1], [[1.0], [5.0], [5.0]], [0, 0, 1], neighbours=1)
    of_other_label = 1 / 3 * 1 / 3 + 1 / 3 * (1 / 3 - 11 / 18) / 2
    np.testing.assert_allclose(result.values, [1 / 3 * 1 / 3 + 1 / 3 * 11 / 18, of_other_label, of_other_label])


@pytest.mark.parametrize("k", [1, 3, 12])
def test_it_equals_the_shapley_value_of_the_votes(k: int) -> None:
    generator = np.random.default_rng(k)
    features, records = generator.normal(size=(9, 3)), generator.normal(size=(40, 3))
    labels, true = np.arange(9) % 3, np.arange(40) % 3
    utility = KNNUtility(features, labels, records, true, neighbours=k, score="votes")
    np.testing.assert_allclose(
        knn_shapley(features, labels, records, true, neighbours=k).values, shapley(utility).values, atol=1e-12
    )


def test_equal_rows_have_equal_values() -> None:
    generator = np.random.default_rng(0)
    rows = generator.normal(size=(20, 50))
    features = np.concatenate([rows, rows[::-1], rows])
    labels = np.concatenate([np.arange(20) % 2, np.arange(20)[::-1] % 2, np.arange(20) % 2])
    result = knn_shapley(features, labels, generator.normal(size=(30, 50)), np.arange(30) % 2, neighbours=4).values
    np.testing.assert_allclose(result[:20], result[40:], atol=1e-15)
    np.testing.assert_allclose(result[:20], result[20:40][::-1], atol=1e-15)
    assert len(np.unique(result.round(12))) > 15


def test_values_of_many_blocks_sum_to_the_full_score(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = np.random.default_rng(1)
    features, records = generator.normal(size=(200, 4)), generator.normal(size=(57, 4))
    labels, true = np.arange(200) % 5, np.arange(57) % 5
    utility = KNNUtility(features, labels, records, true, neighbours=7, score="votes")
    whole = knn_shapley(features, labels, records, true, neighbours=7).values
    np.testing.assert_allclose(whole.sum(), utility(np.arange(200)), rtol=1e-12)
    monkeypatch.setattr("posttrain.attribution.utilities.knn._BLOCK_PAIRS", 2000)
    np.testing.assert_allclose(knn_shapley(features, labels, records, true, neighbours=7).values, whole, atol=1e-15)


def test_wrong_labels_have_the_lowest_negative_values() -> None:
    generator = np.random.default_rng(2)
    labels = np.arange(100) % 2
    features = generator.normal(size=(100, 2)) + 6 * labels[:, None]
    wrong_labels = labels.copy()
    wrong_labels[[3, 40, 77]] = 1 - wrong_labels[[3, 40, 77]]
    records = generator.normal(size=(100, 2)) + 6 * labels[:, None]
    result = knn_shapley(features, wrong_labels, records, labels).values
    assert set(np.argsort(result)[:3]) == {3, 40, 77}
    assert (result[[3, 40, 77]] < 0).all()
