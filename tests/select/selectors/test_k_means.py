"""k-means against scikit-learn's."""

import numpy as np
import pytest
from sklearn.cluster import KMeans, MiniBatchKMeans

from posttrain.select.selectors import k_means as module
from posttrain.select.selectors.k_means import k_means
from posttrain.select.selectors.registry import select
from posttrain.store.errors import UserError


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


@pytest.mark.slow
@pytest.mark.parametrize("weighted", [False, True])
def test_mini_batch_clusters_are_nearly_as_tight(weighted: bool) -> None:
    points = cloud(3000, 4)
    weights = np.random.default_rng(1).exponential(size=3000) if weighted else np.ones(3000)
    rows = np.arange(3000)
    actual = [float(weights @ k_means(points, rows, 25, seed, weights, 500).distances) for seed in range(10)]
    expected = [
        MiniBatchKMeans(25, n_init=1, batch_size=500, random_state=seed).fit(points, sample_weight=weights).inertia_
        for seed in range(10)
    ]
    assert np.mean(actual) < 1.02 * np.mean(expected)
    assert np.mean(actual) < 1.05 * np.mean(inertia(points, weights, 25))


def test_a_centre_is_the_mean_of_all_rows_that_were_nearest_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sculley's algorithm 1 row by row, from the same first centres and batches."""
    points = cloud(400, 5)
    monkeypatch.setattr(module, "_MAX_BATCHES", 4)
    first_centres: list[np.ndarray] = []
    original = module._first_centres
    monkeypatch.setattr(
        module,
        "_first_centres",
        lambda *arguments: first_centres.append(original(*arguments)) or first_centres[-1],  # type: ignore[func-returns-value]
    )
    result = k_means(points, np.arange(400), 6, 0, mini_batch=100)
    sample = points[np.random.default_rng(0).permutation(400)].astype(np.float64)
    centres, counts = first_centres[0].astype(np.float64), np.zeros(6)
    for batch in np.split(sample, 4):
        nearest = ((batch[:, None] - centres) ** 2).sum(axis=-1).argmin(axis=1)
        for row, centre in zip(batch, nearest, strict=True):
            counts[centre] += 1
            centres[centre] += (row - centres[centre]) / counts[centre]
    np.testing.assert_allclose(result.centres, centres, rtol=1e-4, atol=1e-5)


def test_a_mini_batch_of_size_zero_is_refused() -> None:
    with pytest.raises(UserError, match="`mini_batch` is 0, and must be a whole number, 1 or more"):
        select("diverse", {"embeddings": cloud(50, 6)}, 5, mini_batch=0)
    assert len(set(select("diverse", {"embeddings": cloud(50, 6)}, 50, mini_batch=7).tolist())) == 50
