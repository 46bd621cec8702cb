"""TIES against its paper's definition."""

import numpy as np
import pytest

WEIGHT = [1.0, 0.5, 0.8]


def trim(vector: np.ndarray, density: float) -> np.ndarray:
    count = max(1, int(density * vector.size)) if density > 0 else 0
    if not count:
        return np.zeros_like(vector)
    threshold = np.sort(np.abs(vector).ravel())[vector.size - count]
    return np.where(np.abs(vector) >= threshold, vector, 0.0)


@pytest.mark.parametrize("election", ["weighted", "count"])
@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("weight", [WEIGHT, [1.0, -0.5, 0.3], [1.0, 0.0, 0.5], [1e-12, 2e-12, 1e-12]])
def test_equals_the_definition(merge_vectors, vectors, elect, election, normalize, weight) -> None:
    density = [0.2, 0.5, 1.0]
    merged = merge_vectors(
        "ties", vectors, weight=weight, density=density, election=election, normalize=normalize, scale=0.7
    )
    trimmed = [factor * trim(vector, share) for vector, share, factor in zip(vectors, density, weight, strict=True)]
    expected = 0.7 * elect(trimmed, weight, normalize and weight[0] > 1e-6, election == "count")
    if normalize and weight[0] < 1e-6:
        # Weights count by their ratio.
        expected = 0.7 * elect(
            [vector * 1e12 for vector in trimmed], [factor * 1e12 for factor in weight], True, election == "count"
        )
    np.testing.assert_allclose(merged, expected, rtol=2e-6, atol=1e-7 * abs(expected).max())


def test_what_is_equal_to_the_smallest_kept_stays(merge_vectors) -> None:
    vector = np.array([[1.0, -2.0, 2.0, 3.0]])
    assert merge_vectors("ties", [vector], density=0.5).tolist() == [[0.0, -2.0, 2.0, 3.0]]


def test_a_draw_is_positive(merge_vectors) -> None:
    vectors = [np.array([[1.0, -3.0]]), np.array([[-1.0, 3.0]])]
    assert merge_vectors("ties", vectors, density=1.0).tolist() == [[1.0, 3.0]]


def test_weights_that_cancel_divide_nothing(merge_vectors) -> None:
    # 0.1 + 0.2 - 0.3 is not 0 in floating point, and a division by it would be noise.
    vectors = [np.array([[1.0]]), np.array([[1.0]]), np.array([[-1.0]])]
    merged = merge_vectors("ties", vectors, density=1.0, weight=[0.1, 0.2, -0.3])
    np.testing.assert_allclose(merged, [[0.6]], rtol=1e-6)


@pytest.mark.parametrize("density", [0.0, 1.0])
def test_limits(merge_vectors, vectors, density) -> None:
    assert np.array_equal(merge_vectors("ties", vectors[:1], density=density), density * vectors[0])
