"""Model Breadcrumbs against its paper's definition."""

import numpy as np
import pytest

WEIGHT, DENSITY, GAMMA = [1.0, 0.5, 0.8], [0.3, 0.9, 0.6], [0.03, 0.2, 0.0]


def crumbs(vector, density, gamma):
    """Drops the largest and the smallest elements, by sorting them."""
    order = np.argsort(-np.abs(vector).ravel(), kind="stable")
    kept = max(1, int(density * vector.size)) if density > 0 else 0
    outliers = min(int(gamma * vector.size), vector.size - kept)
    mask = np.zeros(vector.size)
    mask[order[outliers : outliers + kept]] = 1
    return vector * mask.reshape(vector.shape)


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("method", ["breadcrumbs", "breadcrumbs_ties"])
def test_equals_the_definition(merge_vectors, vectors, elect, method, normalize) -> None:
    options = {"weight": WEIGHT, "density": DENSITY, "gamma": GAMMA, "normalize": normalize, "scale": 0.7}
    masked = [
        factor * crumbs(vector, density, gamma)
        for vector, factor, density, gamma in zip(vectors, WEIGHT, DENSITY, GAMMA, strict=True)
    ]
    expected = sum(masked) / (sum(WEIGHT) if normalize else 1)
    if method == "breadcrumbs_ties":
        expected = elect(masked, WEIGHT, normalize)
    np.testing.assert_allclose(merge_vectors(method, vectors, **options), 0.7 * expected, atol=1e-6)


@pytest.mark.parametrize("memory", [0, 1 << 30])
def test_thresholds_are_exact_in_a_tensor_larger_than_the_sample(merge_vectors, memory) -> None:
    vector = np.random.default_rng(0).permutation(700 * 512).reshape(700, 512) + 1.0
    merged = merge_vectors("breadcrumbs", [vector], density=0.4, gamma=0.013, memory=memory)
    assert np.array_equal(merged, crumbs(vector, 0.4, 0.013))


@pytest.mark.parametrize("size", [1, 2, 10, 99])
def test_small_tensors_lose_no_outlier(merge_vectors, size) -> None:
    vector = np.arange(1.0, size + 1)[None]
    merged = merge_vectors("breadcrumbs", [vector], density=0.5, gamma=0.01)
    assert np.array_equal(merged, np.where(vector > size - max(1, size // 2), vector, 0))


def test_equals_of_the_ends_stay(merge_vectors) -> None:
    vector = np.array([[5.0, 4.0, -4.0, 4.0, 3.0, 2.0, -2.0, 1.0]])
    # Ranks 2 to 6 stay: the first of them is 4 and the last 2, as is the seventh.
    merged = merge_vectors("breadcrumbs", [vector], density=0.625, gamma=0.125)
    assert merged.tolist() == [[0.0, 4.0, -4.0, 4.0, 3.0, 2.0, -2.0, 0.0]]
    assert np.array_equal(merge_vectors("breadcrumbs", [np.full((3, 5), -2.0)], density=0.2), np.full((3, 5), -2.0))


@pytest.mark.parametrize("method", ["breadcrumbs", "breadcrumbs_ties"])
def test_limits(merge_vectors, vectors, method) -> None:
    assert np.array_equal(merge_vectors(method, vectors[:1], density=1.0, gamma=0.3), vectors[0])
    assert not merge_vectors(method, vectors, density=0.0, gamma=0.3).any()
    assert not merge_vectors(method, [np.zeros((2, 3))], density=0.5, gamma=0.5).any()
