"""SCE against its paper's definition."""

import numpy as np
import pytest


def reference(vectors, share, normalize, weight=(1.0, 1.0, 1.0)):
    variance = np.var(np.stack(vectors), axis=0)
    threshold = np.sort(variance.ravel())[variance.size - max(1, int(share * variance.size))]
    selected = [np.where(variance >= threshold, vector, 0.0) for vector in vectors]
    squares = np.array([(vector**2).sum() for vector in selected])
    coefficients = np.array(weight) * squares / squares.sum()
    sign = np.where(sum(selected) >= 0, 1.0, -1.0)
    erased = [np.where(vector * sign > 0, vector, 0.0) for vector in selected]
    total = sum(factor * vector for factor, vector in zip(coefficients, erased, strict=True))
    divisor = sum(factor * (vector != 0) for factor, vector in zip(coefficients, erased, strict=True))
    return np.divide(total, divisor, where=divisor > 0, out=np.zeros_like(total)) if normalize else total


@pytest.mark.parametrize("share", [0.0001, 0.1, 0.5, 1.0])
@pytest.mark.parametrize("normalize", [True, False])
def test_equals_the_definition(merge_vectors, vectors, share, normalize) -> None:
    vectors = [vectors[0], 3 * vectors[1], 0.5 * vectors[2]]
    merged = merge_vectors("sce", vectors, select_topk=share, normalize=normalize, scale=0.7)
    np.testing.assert_allclose(merged, 0.7 * reference(vectors, share, normalize), atol=2e-6)
    weight = [1.0, 2.0, 0.3]
    merged = merge_vectors("sce", vectors, select_topk=share, normalize=normalize, weight=weight)
    np.testing.assert_allclose(merged, reference(vectors, share, normalize, weight), atol=4e-6)


@pytest.mark.parametrize("memory", [0, 1 << 30])
def test_equals_the_definition_in_a_tensor_larger_than_the_sample(merge_vectors, memory) -> None:
    generator = np.random.default_rng(1)
    order = generator.permutation(700 * 512).reshape(700, 512)
    vectors = [order / 2**10, -order / 2**10]  # the variance is that of no two elements alike
    merged = merge_vectors("sce", vectors, select_topk=0.1, memory=memory, normalize=False)
    np.testing.assert_allclose(merged, reference(vectors, 0.1, False, (1.0, 1.0)), rtol=1e-5)


def test_identical_models_are_merged_to_themselves(merge_vectors, vectors) -> None:
    # No variance at all: every element equals the smallest that is selected.
    merged = merge_vectors("sce", [vectors[0]] * 3, select_topk=0.1)
    np.testing.assert_allclose(merged, vectors[0], rtol=1e-6)


def test_limits(merge_vectors, vectors) -> None:
    assert not merge_vectors("sce", vectors, select_topk=0.0).any()
    assert not merge_vectors("sce", [np.zeros((3, 4))] * 2, select_topk=0.5).any()
    np.testing.assert_allclose(merge_vectors("sce", vectors[:1], select_topk=0.3), vectors[0], rtol=1e-6)
    assert np.array_equal(merge_vectors("sce", [np.zeros((3, 4)), np.ones((3, 4))]), np.ones((3, 4)))
