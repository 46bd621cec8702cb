"""k-means against scikit-learn's."""

import numpy as np
import pytest

from posttrain.select.selectors import k_means as module
from posttrain.select.selectors.k_means import Clusters, k_means


def cloud(rows: int, seed: int) -> np.ndarray:
    generator = np.random.default_rng(seed)
    centres = generator.normal(size=(30, 10)) * 2
    return (centres[generator.integers(0, 30, rows)] + generator.normal(size=(rows, 10))).astype(np.float32)


def inertia(points: np.ndarray, weights: np.ndarray, count: int) -> list[float]:
    return [
        float(weights @ k_means(points, np.arange(len(points)), count, seed, weights).distances) for seed in range(10)
    ]


@pytest.mark.slow
def test_clusters_are_as_tight_as_those_of_scikit_learn() -> None:
    from sklearn.cluster import KMeans

    points = cloud(2000, 0)
    weights = np.random.default_rng(1).exponential(size=2000)
    actual = inertia(points, weights, 25)
    expected = [
        KMeans(25, n_init=1, random_state=seed).fit(points, sample_weight=weights).inertia_ for seed in range(10)
    ]
    assert np.mean(actual) < 1.02 * np.mean(expected)


@pytest.mark.slow
def test_clusters_of_a_sample_are_nearly_as_tight(monkeypatch: pytest.MonkeyPatch) -> None:
    points = cloud(4000, 2)
    whole = inertia(points, np.ones(4000), 20)
    monkeypatch.setattr(module, "_ROWS_A_CENTRE", 50)
    assert np.mean(inertia(points, np.ones(4000), 20)) < 1.03 * np.mean(whole)


def test_each_row_belongs_to_its_nearest_centre() -> None:
    points, rows = cloud(500, 3), np.arange(0, 500, 2)
    result = k_means(points, rows, 12, 0)
    squares = ((points[rows][:, None] - result.centres) ** 2).sum(axis=-1)
    np.testing.assert_array_equal(result.cluster, squares.argmin(axis=1))
    np.testing.assert_allclose(result.distances, squares.min(axis=1), rtol=1e-3, atol=1e-4)


def test_fewer_different_rows_than_centres() -> None:
    points = np.repeat(np.eye(3, dtype=np.float32), 5, axis=0)
    result = k_means(points, np.arange(15), 7, 0)
    assert result.distances.max() < 1e-6
    assert np.isfinite(result.centres).all()


def test_rows_of_weight_zero_move_no_centre() -> None:
    points = np.array([[0.0], [1.0], [100.0], [101.0], [50.0]], np.float32)
    result = k_means(points, np.arange(5), 2, 0, np.array([1.0, 1.0, 1.0, 1.0, 0.0]))
    assert sorted(result.centres.ravel().tolist()) == [0.5, 100.5]


def test_an_empty_cluster_moves_to_a_row_farthest_from_its_centre() -> None:
    points = np.array([[0.0], [1.0], [10.0], [20.0]], np.float32)
    clusters = Clusters(
        np.array([[0.0], [50.0]], np.float32), np.zeros(4, np.int64), np.array([0, 1, 100, 400], np.float32)
    )
    weights = np.array([1.0, 1.0, 1.0, 0.0])  # a row without weight is not worth a centre
    assert module._means(points, weights, clusters).ravel().tolist() == pytest.approx([11 / 3, 10])


def test_a_search_begins_in_proportion_to_the_weights() -> None:
    """In one dimension, with rows at two places: the first centre is one of the heavier place nearly every time."""
    points = np.array([[0.0]] * 50 + [[10.0]] * 50, np.float32)
    weights = np.array([1.0] * 50 + [9.0] * 50)
    first = [float(module._first_centres(points, 1, weights, seed)[0, 0]) for seed in range(300)]
    assert np.mean(np.array(first) == 10.0) > 0.95
    unweighted = [float(module._first_centres(points, 1, np.ones(100), seed)[0, 0]) for seed in range(300)]
    assert 0.4 < np.mean(np.array(unweighted) == 10.0) < 0.6
