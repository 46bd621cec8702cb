"""DARE against its paper's definition, with the same random numbers, and its mean over many."""

import numpy as np
import pytest

WEIGHT, DENSITY = [1.0, 0.5, -0.8], [0.3, 0.5, 0.9]


def drop(vectors, random_levels, density, rescale=True):
    kept = [round(share * 65536) for share in density]
    masks = [random_levels(vector.shape, model) < kept[model] for model, vector in enumerate(vectors)]
    return [
        vector * mask * (65536 / levels if rescale else 1)
        for vector, mask, levels in zip(vectors, masks, kept, strict=True)
    ]


@pytest.mark.parametrize("rescale", [True, False])
@pytest.mark.parametrize("normalize", [True, False])
def test_linear_equals_the_definition(merge_vectors, vectors, random_levels, rescale, normalize) -> None:
    options = {"weight": WEIGHT, "density": DENSITY, "normalize": normalize, "rescale": rescale, "scale": 0.7}
    dropped = drop(vectors, random_levels, DENSITY, rescale)
    expected = 0.7 * sum(factor * vector for factor, vector in zip(WEIGHT, dropped, strict=True))
    expected /= sum(WEIGHT) if normalize else 1
    np.testing.assert_allclose(merge_vectors("dare_linear", vectors, **options), expected, atol=1e-5)


@pytest.mark.parametrize("election", ["weighted", "count"])
@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("weight", [[1.0, 0.5, 0.8], [0.5, 0.5, 0.5]])
def test_ties_equals_the_definition(merge_vectors, vectors, random_levels, elect, election, normalize, weight) -> None:
    options = {"weight": weight, "density": DENSITY, "normalize": normalize, "election": election, "scale": 0.7}
    dropped = [factor * vector for factor, vector in zip(weight, drop(vectors, random_levels, DENSITY), strict=True)]
    expected = 0.7 * elect(dropped, weight, normalize, election == "count")
    np.testing.assert_allclose(merge_vectors("dare_ties", vectors, **options), expected, atol=1e-5)


@pytest.mark.parametrize("density", [0.5, 0.1, 0.0013])
def test_mean_is_unbiased(merge_vectors, random_levels, density) -> None:
    count = 1 << 20
    merged = merge_vectors("dare_linear", [np.ones((512, count // 512))], density=density)
    levels = np.concatenate([random_levels((32, 2048), 0, block) for block in range(16)])
    assert np.array_equal(merged > 0, levels < round(density * 65536))
    assert abs((merged > 0).mean() - density) < 1 / 65536 + 5 * np.sqrt(density / count)
    assert abs(merged.mean() - 1) < 5 * np.sqrt((1 - density) / density / count)


def test_masks_are_independent_between_models_blocks_and_tensors(merge_vectors) -> None:
    shape = (256, 512)  # two blocks
    ones, zeros = np.ones(shape), np.zeros(shape)
    first = merge_vectors("dare_linear", [ones, zeros]) > 0
    masks = [
        first[:128],
        first[128:],
        merge_vectors("dare_linear", [zeros, ones])[:128] > 0,
        merge_vectors("dare_linear", [ones, zeros], name="other")[:128] > 0,
        merge_vectors("dare_linear", [ones, zeros], seed=1)[:128] > 0,
    ]
    correlation = np.corrcoef([mask.ravel() for mask in masks])
    assert abs(correlation - np.eye(len(masks))).max() < 5 / np.sqrt(masks[0].size)


@pytest.mark.parametrize("method", ["dare_linear", "dare_ties"])
def test_limits(merge_vectors, vectors, method) -> None:
    assert np.array_equal(merge_vectors(method, vectors[:1], density=1.0), vectors[0])
    assert not merge_vectors(method, vectors, density=0.0).any()
    for density in (1e-9, 1 - 1e-9):
        assert np.isfinite(merge_vectors(method, vectors, density=density)).all()
    assert np.array_equal(merge_vectors(method, [np.array([[3.0]])], density=1.0), [[3.0]])
