"""The Karcher mean against an iteration on the vectors themselves, in float64."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.merge.methods.karcher import karcher_coefficients
from posttrain.merge.methods.slerp import slerp_coefficients
from posttrain.testing.merge_methods import merge_tensor, merge_tensors, random_models


def pull(mean: np.ndarray, units: Sequence[np.ndarray], shares: np.ndarray) -> np.ndarray:
    """Returns the weighted sum of the log maps at ``mean``; at the Karcher mean it is zero."""
    total = np.zeros_like(mean)
    for unit, share in zip(units, shares, strict=True):
        tangent = unit - np.sum(mean * unit) * mean
        length = np.linalg.norm(tangent)
        if length > 0:
            total += share * np.arctan2(length, np.sum(mean * unit)) * tangent / length
    return total


def reference(vectors: Sequence[np.ndarray], weight: Sequence[float]) -> np.ndarray:
    """Returns the Karcher mean."""
    shares = np.array(weight) / sum(weight)
    norms = [np.linalg.norm(vector) for vector in vectors]
    units = [vector / norm for vector, norm in zip(vectors, norms, strict=True)]
    mean = sum(share * unit for share, unit in zip(shares, units, strict=True))
    mean /= np.linalg.norm(mean)
    for _ in range(500):
        step = pull(mean, units, shares)
        length = np.linalg.norm(step)
        if length < 1e-14:
            break
        mean = np.cos(length) * mean + np.sin(length) / length * step
        mean /= np.linalg.norm(mean)
    return float(shares @ norms) * mean


@pytest.mark.parametrize("weight", [[1.0, 1.0, 1.0], [0.5, 0.3, 0.2], [1.0, 0.0, 3.0]])
@pytest.mark.parametrize("shared", [0.0, 1.0, 100.0])
def test_tensor(weight: list[float], shared: float) -> None:
    generator = np.random.default_rng(0)
    common = shared * generator.normal(size=(130, 600))
    models = [
        torch.tensor(scale * (common + generator.normal(size=common.shape)), dtype=torch.float32) for scale in (1, 2, 4)
    ]
    expected = reference([model.double().numpy() for model in models], weight)
    result = merge_tensor("karcher", models, weight=weight).double().numpy()
    assert np.abs(result - expected).max() <= 2e-6 * np.abs(expected).max()


def test_model() -> None:
    models, _ = random_models(3)
    flat = [np.concatenate([tensor.double().numpy().ravel() for tensor in model.values()]) for model in models]
    expected = reference(flat, [1, 2, 3])
    merged = merge_tensors("karcher", models, scope="model", weight=[1.0, 2.0, 3.0])
    result = np.concatenate([merged[name].double().numpy().ravel() for name in models[0]])
    assert np.abs(result - expected).max() <= 2e-6 * np.abs(expected).max()


@given(seed=st.integers(0, 2**32 - 1), vectors=st.integers(1, 6), spread=st.floats(1e-6, 0.6))
@settings(max_examples=40)
def test_no_direction_pulls_at_the_mean(seed: int, vectors: int, spread: float) -> None:
    generator = np.random.default_rng(seed)
    rows = generator.normal(size=8) + spread * generator.normal(size=(vectors, 8))
    weight = generator.uniform(0.1, 1, vectors)
    mean = np.array(karcher_coefficients(rows @ rows.T, weight.tolist())) @ rows
    norms = np.linalg.norm(rows, axis=1)
    shares = weight / weight.sum()
    assert np.linalg.norm(mean) == pytest.approx(shares @ norms)
    unit = mean / np.linalg.norm(mean)
    assert np.linalg.norm(pull(unit, list(rows / norms[:, None]), shares)) < 1e-7


@given(cosine=st.floats(-0.99, 1), t=st.floats(0, 1))
def test_of_two_unit_vectors_it_is_slerp(cosine: float, t: float) -> None:
    gram = np.array([[1.0, cosine], [cosine, 1.0]])
    coefficients = np.array(karcher_coefficients(gram, [1 - t, t], max_iter=1000))
    # The vectors, as those of near vectors may be traded for each other.
    vectors = np.array([[1.0, 0.0], [cosine, np.sqrt(1 - cosine**2)]])
    expected = np.array(slerp_coefficients(np.float64(cosine), t))
    np.testing.assert_allclose(coefficients @ vectors, expected @ vectors, atol=1e-6)


def test_directions_that_cancel_give_the_weighted_average() -> None:
    first, second = torch.tensor([3.0, 4.0]), torch.tensor([-6.0, -8.0])
    assert merge_tensor("karcher", [first, second]).tolist() == pytest.approx([-1.5, -2.0])
    triangle = [torch.tensor([np.cos(angle), np.sin(angle)]) for angle in 2 * np.pi / 3 * np.arange(3)]
    assert merge_tensor("karcher", triangle).tolist() == pytest.approx([0, 0], abs=1e-6)


def test_zero_vector_counts_for_the_norm_alone() -> None:
    vector, zero = torch.tensor([3.0, 4.0]), torch.zeros(2)
    assert merge_tensor("karcher", [vector, zero], weight=[1.0, 3.0]).tolist() == pytest.approx([0.75, 1.0])
    assert merge_tensor("karcher", [zero, zero]).tolist() == [0, 0]


def test_one_model_is_its_own_mean() -> None:
    vector = torch.tensor([3.0, 4.0])
    assert merge_tensor("karcher", [vector]).tolist() == pytest.approx([3.0, 4.0])


def test_more_iterations_come_nearer() -> None:
    generator = np.random.default_rng(4)
    rows = generator.normal(size=5) + generator.normal(size=(3, 5))
    exact = np.array(karcher_coefficients(rows @ rows.T, [1.0, 1.0, 1.0], 1000, 1e-14))
    errors = [
        np.abs(np.array(karcher_coefficients(rows @ rows.T, [1.0, 1.0, 1.0], iterations)) - exact).max()
        for iterations in (1, 3, 6)
    ]
    assert errors[0] > errors[1] > errors[2]
