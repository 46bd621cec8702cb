"""DELLA against its paper's definition, with the same random numbers, and its mean over many."""

import numpy as np
import pytest

from posttrain.merge.methods.della import rank_levels

WEIGHT, DENSITY, EPSILON = [1.0, 0.5, 0.8], [0.3, 0.5, 0.8], [0.2, 0.0, 0.1]


def magprune(vector, levels, density, epsilon, rescale=True):
    """Drops by magnitude's rank in each row; the random numbers belong to the ranks."""
    result = np.zeros_like(vector)
    columns = vector.shape[1]
    for row, numbers, out in zip(vector, levels, result, strict=True):
        for rank, column in enumerate(np.argsort(np.abs(row), kind="stable")):
            kept = round((density + epsilon * (2 * rank + 1 - columns) / columns) * 65536)
            if numbers[rank] < kept:
                out[column] = row[column] * (65536 / kept if rescale else 1)
    return result


def pruned(vectors, random_levels, rescale=True):
    return [
        magprune(vector, random_levels(vector.shape, model), DENSITY[model], EPSILON[model], rescale)
        for model, vector in enumerate(vectors)
    ]


@pytest.mark.parametrize("rescale", [True, False])
@pytest.mark.parametrize("normalize", [True, False])
def test_linear_equals_the_definition(merge_vectors, vectors, random_levels, rescale, normalize) -> None:
    options = {"weight": WEIGHT, "density": DENSITY, "epsilon": EPSILON, "normalize": normalize, "rescale": rescale}
    expected = sum(
        factor * vector for factor, vector in zip(WEIGHT, pruned(vectors, random_levels, rescale), strict=True)
    )
    expected *= 0.7 / (sum(WEIGHT) if normalize else 1)
    np.testing.assert_allclose(merge_vectors("della_linear", vectors, scale=0.7, **options), expected, atol=1e-5)


@pytest.mark.parametrize("election", ["weighted", "count"])
@pytest.mark.parametrize("normalize", [True, False])
def test_equals_the_definition(merge_vectors, vectors, random_levels, elect, election, normalize) -> None:
    options = {"weight": WEIGHT, "density": DENSITY, "epsilon": EPSILON, "normalize": normalize, "election": election}
    weighted = [factor * vector for factor, vector in zip(WEIGHT, pruned(vectors, random_levels), strict=True)]
    expected = 0.7 * elect(weighted, WEIGHT, normalize, election == "count")
    np.testing.assert_allclose(merge_vectors("della", vectors, scale=0.7, **options), expected, atol=1e-5)


def test_mean_is_unbiased_and_large_elements_stay_more_often(merge_vectors) -> None:
    rows, row = 1 << 16, np.array([0.3, -4.0, 1.0, 0.0, -0.2])
    density, epsilon = 0.4, 0.3
    merged = merge_vectors("della_linear", [np.tile(row, (rows, 1))], density=density, epsilon=epsilon)
    ranks = np.argsort(np.argsort(np.abs(row)))
    probability = density + epsilon * (2 * ranks + 1 - 5) / 5
    kept = (merged != 0).mean(axis=0)
    live = row != 0
    assert np.all(abs(kept - probability)[live] < 5 * np.sqrt(probability * (1 - probability) / rows)[live])
    deviation = np.abs(row) * np.sqrt((1 - probability) / probability / rows)
    assert np.all(abs(merged.mean(axis=0) - row) <= 5 * deviation)


def test_equals_are_ranked_by_column(merge_vectors, random_levels) -> None:
    vector = np.array([[1.0, -1.0, 0.5, 1.0, -0.5, 1.0]] * 300)
    expected = magprune(vector, random_levels(vector.shape, 0), 0.5, 0.4)
    np.testing.assert_allclose(merge_vectors("della_linear", [vector], density=0.5, epsilon=0.4), expected, rtol=1e-6)


@pytest.mark.parametrize("columns", [1, 2, 7, 4096])
@pytest.mark.parametrize("density", [0.0, 1e-6, 0.1, 0.5, 0.95, 1.0])
def test_mean_probability_is_the_density(columns, density) -> None:
    levels = rank_levels(columns, density, 0.15)
    assert abs(levels.mean() / 65536 - density) <= 1 / 65536
    assert np.all(np.diff(levels) >= 0)
    assert 0 <= levels.min() <= levels.max() <= 65536


@pytest.mark.parametrize("method", ["della", "della_linear"])
def test_limits(merge_vectors, vectors, method) -> None:
    assert np.array_equal(merge_vectors(method, vectors[:1], density=1.0), vectors[0])
    assert not merge_vectors(method, vectors, density=0.0).any()
    for density in (1e-9, 0.05, 0.99):
        assert np.isfinite(merge_vectors(method, vectors, density=density)).all()
    assert np.array_equal(merge_vectors(method, [np.array([[3.0]])], density=1.0), [[3.0]])
