"""TALL masks and their consensus against the paper's definition."""

import numpy as np
import pytest

from posttrain.store.errors import UserError

WEIGHT, LAMBDA = [1.0, 0.5, 0.8], [0.2, 0.4, 0.9]


def masks_and_total(vectors, normalize=False):
    total = sum(factor * vector for factor, vector in zip(WEIGHT, vectors, strict=True))
    total = total / (sum(WEIGHT) if normalize else 1)
    masks = [np.abs(vector) >= factor * np.abs(total - vector) for vector, factor in zip(vectors, LAMBDA, strict=True)]
    return masks, total


@pytest.mark.parametrize("agreement", [0, 1, 2, 3, 9])
@pytest.mark.parametrize("normalize", [True, False])
def test_consensus_equals_the_definition(merge_vectors, vectors, agreement, normalize) -> None:
    masks, total = masks_and_total(vectors, normalize)
    expected = 0.7 * total * (sum(mask.astype(int) for mask in masks) >= min(agreement, 3))
    options = {"weight": WEIGHT, "mask_lambda": LAMBDA, "agreement": agreement, "normalize": normalize, "scale": 0.7}
    np.testing.assert_allclose(merge_vectors("consensus", vectors, **options), expected, atol=1e-6)


@pytest.mark.parametrize("task", [1, 2, 3])
def test_tall_equals_the_definition(merge_vectors, vectors, task) -> None:
    masks, total = masks_and_total(vectors)
    merged = merge_vectors("tall", vectors, task=task, weight=WEIGHT, mask_lambda=LAMBDA[task - 1], scale=0.7)
    np.testing.assert_allclose(merged, 0.7 * total * masks[task - 1], atol=1e-6)


def test_a_larger_lambda_gives_a_sparser_mask(merge_vectors, vectors) -> None:
    counts = [np.count_nonzero(merge_vectors("tall", vectors, mask_lambda=value)) for value in (0.0, 0.4, 1.0, 1e9)]
    assert counts[0] == vectors[0].size > counts[1] > counts[2] > counts[3]


def test_limits(merge_vectors, vectors) -> None:
    for method in ("consensus", "tall"):
        assert np.array_equal(merge_vectors(method, vectors[:1]), vectors[0])
        assert not merge_vectors(method, [np.zeros((3, 4))] * 2).any()
    # Selfish weights: only one model moved the element, and the others' masks leave it out.
    assert merge_vectors("consensus", [np.array([[1.0, 1.0]]), np.array([[0.0, 1.0]])]).tolist() == [[0.0, 2.0]]


def test_a_task_without_a_model_is_an_error(merge_vectors, vectors) -> None:
    with pytest.raises(UserError, match="task"):
        merge_vectors("tall", vectors, task=4)
