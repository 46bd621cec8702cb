"""Merge methods against peft's own functions, where the definitions are the same, and where they are not.

Max difference of what is equal: below 1e-6 of elements of size 1, which is the rounding of float32.
"""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

pytestmark = pytest.mark.slow  # peft loads transformers

Merge = Callable[..., np.ndarray]

WEIGHT = [1.0, 0.5, -0.8]


@pytest.fixture
def peft_merge(
    vectors: list[np.ndarray], random_levels: Callable[..., np.ndarray], monkeypatch: pytest.MonkeyPatch
) -> Merge:
    """Returns a function that merges the vectors with one of peft's, which draws the numbers that we draw."""
    from peft.utils import merge_utils

    def prune(levels: Iterator[np.ndarray]) -> Callable[..., torch.Tensor]:
        def random_pruning(tensor: torch.Tensor, density: float, rescale: bool) -> torch.Tensor:
            kept = tensor * torch.from_numpy(next(levels) < density * 65536)
            return kept / density if rescale else kept

        return random_pruning

    def merge(name: str, weight: list[float], **options: Any) -> np.ndarray:
        levels = (random_levels(vector.shape, model) for model, vector in enumerate(vectors))
        monkeypatch.setattr(merge_utils, "random_pruning", prune(levels))
        tensors = [torch.from_numpy(vector) for vector in vectors]
        merged: torch.Tensor = getattr(merge_utils, name)(tensors, torch.tensor(weight, dtype=torch.float64), **options)
        return merged.numpy()

    return merge


def _assert_equal(ours: np.ndarray, theirs: np.ndarray) -> None:
    assert np.abs(theirs).max() > 0.5
    np.testing.assert_allclose(ours, theirs, atol=1e-6)


def test_task_arithmetic(merge_vectors: Merge, vectors: list[np.ndarray], peft_merge: Merge) -> None:
    ours = merge_vectors("task_arithmetic", vectors, weight=WEIGHT)
    _assert_equal(ours, peft_merge("task_arithmetic", WEIGHT))


@pytest.mark.parametrize(("election", "theirs"), [("weighted", "total"), ("count", "frequency")])
@pytest.mark.parametrize("density", [0.2, 0.7])
@pytest.mark.parametrize("weight", [1.0, 0.4])
def test_ties_with_equal_weights(
    election: str,
    theirs: str,
    density: float,
    weight: float,
    merge_vectors: Merge,
    vectors: list[np.ndarray],
    peft_merge: Merge,
) -> None:
    # Of equal weights, peft's mean is that of the weighted vectors: our scale.
    ours = merge_vectors("ties", vectors, density=density, election=election, scale=weight)
    _assert_equal(ours, peft_merge("ties", [weight] * 3, density=density, majority_sign_method=theirs))


def test_ties_with_other_weights_is_another_thing(
    merge_vectors: Merge, vectors: list[np.ndarray], peft_merge: Merge
) -> None:
    # peft elects without the weights, and divides by the number of models that agree instead of by their weights.
    weight = [1.0, 0.5, 0.25]
    theirs = peft_merge("ties", weight, density=1.0)
    ours = merge_vectors("ties", vectors, weight=weight, density=1.0)
    assert np.abs(ours - theirs).max() > 0.5
    sign = np.where(sum(vectors) >= 0, 1, -1)
    agree = [np.sign(vector) == sign for vector in vectors]
    total = sum(w * vector * mask for w, vector, mask in zip(weight, vectors, agree, strict=True))
    np.testing.assert_allclose(theirs, total / np.maximum(sum(mask.astype(float) for mask in agree), 1), atol=1e-12)


@pytest.mark.parametrize("density", [0.25, 0.5])
def test_dare_linear(density: float, merge_vectors: Merge, vectors: list[np.ndarray], peft_merge: Merge) -> None:
    ours = merge_vectors("dare_linear", vectors, weight=WEIGHT, density=density)
    _assert_equal(ours, peft_merge("dare_linear", WEIGHT, density=density))


@pytest.mark.parametrize(("election", "theirs"), [("weighted", "total"), ("count", "frequency")])
def test_dare_ties_with_equal_weights(
    election: str, theirs: str, merge_vectors: Merge, vectors: list[np.ndarray], peft_merge: Merge
) -> None:
    # Ours adds by default, after the paper; peft averages.
    ours = merge_vectors("dare_ties", vectors, density=0.5, election=election, normalize=True, scale=0.4)
    _assert_equal(ours, peft_merge("dare_ties", [0.4] * 3, density=0.5, majority_sign_method=theirs))
