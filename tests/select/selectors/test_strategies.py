import numpy as np
import pytest

from posttrain.select.selectors.clustering import nearest_to_centres
from posttrain.select.selectors.registry import select
from posttrain.select.selectors.similarity import whiten


def blobs(clusters: int, size: int, width: int = 8, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Well separated groups far from zero, with one more direction of large noise."""
    generator = np.random.default_rng(seed)
    centres = generator.normal(size=(clusters, width)) * 3
    group = np.repeat(np.arange(clusters), size)
    points = centres[group] + generator.normal(size=(len(group), width)) * 0.1
    noise = generator.normal(size=(len(group), 1)) * 100
    return np.concatenate([points, noise], axis=1).astype(np.float32) + 50, group


@pytest.mark.parametrize("seed", range(5))
def test_diverse_takes_one_row_of_each_group(seed: int) -> None:
    embeddings, group = blobs(6, 30, seed=seed)
    points = embeddings[:, :-1]
    chosen = select("diverse", {"embeddings": points}, 6, seed)
    assert sorted(group[chosen]) == list(range(6))


def test_diverse_takes_the_row_nearest_the_centre_of_a_group() -> None:
    angles = np.concatenate([[0.0, 0.1, -0.1, 0.3, -0.3], np.pi + np.array([0.05, -0.05, 0.0, 0.2, -0.2])])
    embeddings = np.stack([np.cos(angles), np.sin(angles)], axis=1)
    assert sorted(select("diverse", {"embeddings": embeddings}, 2)) == [0, 7]


def test_a_direction_of_large_noise_does_not_dominate() -> None:
    embeddings, group = blobs(6, 40)
    group_counts = [len(set(group[select("diverse", {"embeddings": embeddings}, 12, seed)])) for seed in range(6)]
    raw_group_counts = [len(set(group[_raw_kmeans(embeddings, 12, seed)])) for seed in range(6)]
    assert np.mean(group_counts) > np.mean(raw_group_counts) + 0.4


def _raw_kmeans(embeddings: np.ndarray, n: int, seed: int) -> np.ndarray:
    from sklearn.cluster import KMeans

    distance = KMeans(n, n_init=1, random_state=seed).fit_transform(embeddings)
    return np.unique(distance.argmin(axis=0))


def test_whitened_rows_have_unit_length_and_even_spread() -> None:
    embeddings = np.random.default_rng(0).normal(size=(400, 10)) * np.geomspace(100, 0.01, 10) + 7
    white = whiten(embeddings)
    np.testing.assert_allclose(np.linalg.norm(white, axis=1), 1, rtol=1e-6)
    spread = white.std(axis=0)
    assert spread.max() / spread.min() < 1.2


def test_whitening_is_invariant_to_translation_and_rotation() -> None:
    generator = np.random.default_rng(1)
    embeddings = generator.normal(size=(200, 6)) * [5, 4, 3, 2, 1, 0.5]
    rotation, _ = np.linalg.qr(generator.normal(size=(6, 6)))
    actual, transformed = whiten(embeddings), whiten(embeddings @ rotation + 30)
    np.testing.assert_allclose(actual @ actual.T, transformed @ transformed.T, atol=1e-5)


def test_whitening_keeps_few_components_of_few_rows() -> None:
    assert whiten(np.random.default_rng(0).normal(size=(60, 40))).shape == (60, 6)
    assert whiten(np.ones((5, 3))).tolist() == [[0.0]] * 5


def test_uncertain_diverse_stays_among_the_uncertain_and_covers_them() -> None:
    embeddings, group = blobs(8, 25)
    points, entropy = embeddings[:, :-1], np.where(group < 4, 1.0, 0.1)
    scores = {"embeddings": points, "entropy": entropy}
    chosen = select("uncertain_diverse", scores, 4, pool_factor=25)
    assert sorted(group[chosen]) == [0, 1, 2, 3]
    by_entropy = select("entropy", scores, 4)
    assert set(group[by_entropy]) == {0}


def test_uncertain_diverse_by_margin_takes_small_margins() -> None:
    embeddings, _ = blobs(4, 10)
    margin = np.linspace(0, 1, 40)
    chosen = select("uncertain_diverse", {"embeddings": embeddings, "margin": margin}, 5, by="margin", pool_factor=2)
    assert chosen.max() < 10


def test_measures_may_replace_probabilities() -> None:
    probabilities = np.random.default_rng(0).dirichlet(np.ones(4), 30)
    from posttrain.select.scores import uncertainty

    for name in ("entropy", "least_confidence", "margin"):
        column = getattr(uncertainty, name)(probabilities)
        np.testing.assert_array_equal(
            select(name, {"probabilities": probabilities}, 8), select(name, {name: column}, 8)
        )


def test_unknown_values_come_last() -> None:
    assert select("entropy", {"entropy": np.array([np.nan, 0.1, 0.5])}, 3).tolist() == [2, 1, 0]


def test_weights_pull_the_centres() -> None:
    points = np.random.default_rng(0).normal(size=(300, 3)).astype(np.float32)
    weights = np.where(points[:, 0] > 0, 1.0, 1e-6)
    rows = np.arange(300)
    chosen, plain = nearest_to_centres(points, 20, 0, rows, weights), nearest_to_centres(points, 20, 0, rows)
    assert (points[chosen, 0] > 0).sum() > (points[plain, 0] > 0).sum() + 4


@pytest.mark.parametrize("strategy", ["diverse", "typiclust", "mmr", "facility_location", "badge"])
def test_the_number_of_threads_does_not_matter(strategy: str) -> None:
    from threadpoolctl import threadpool_limits

    generator = np.random.default_rng(0)
    scores = {"embeddings": generator.normal(size=(700, 40)), "probabilities": generator.dirichlet(np.ones(5), 700)}
    chosen = []
    for threads in (1, 2):
        with threadpool_limits(limits=threads):
            chosen.append(select(strategy, scores, 30).tolist())
    assert chosen[0] == chosen[1]
