"""Spherical interpolation against its formula in float64."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.merge.methods.slerp import slerp_coefficients
from posttrain.store.errors import UserError
from posttrain.testing.merge_methods import merge_tensor


def reference(first: np.ndarray, second: np.ndarray, t: float, linear_above: float = 0.9995) -> np.ndarray:
    """Interpolates two vectors."""
    lengths = np.linalg.norm(first) * np.linalg.norm(second)
    cosine = np.sum(first * second) / lengths if lengths else 0.0
    if abs(cosine) > linear_above:
        return (1 - t) * first + t * second
    angle = np.arccos(cosine)
    return (np.sin((1 - t) * angle) * first + np.sin(t * angle) * second) / np.sin(angle)


def pair(shape: tuple[int, ...], cosine: float, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Draws two tensors with this cosine, the second of the fivefold norm."""
    generator = np.random.default_rng(seed)
    first, other = generator.normal(size=(2, *shape))
    other -= np.sum(first * other) / np.sum(first * first) * first
    other *= np.linalg.norm(first) / np.linalg.norm(other)
    second = 5 * (cosine * first + np.sqrt(1 - cosine**2) * other)
    return torch.tensor(first, dtype=torch.float32), torch.tensor(second, dtype=torch.float32)


def assert_near(result: torch.Tensor, expected: np.ndarray, tolerance: float = 1e-6) -> None:
    assert np.abs(result.double().numpy() - expected).max() <= tolerance * max(np.abs(expected).max(), 1e-30)


@pytest.mark.parametrize("t", [0.0, 0.3, 0.5, 1.0])
@pytest.mark.parametrize("cosine", [0.0, 0.4, 0.9994, 0.9996, 1.0, -0.5, -0.99, -0.9996, -1.0])
def test_tensor(cosine: float, t: float) -> None:
    first, second = pair((300, 512), cosine)
    expected = reference(first.double().numpy(), second.double().numpy(), t)
    assert_near(merge_tensor("slerp", [first, second], t=t), expected, 1e-5)


@pytest.mark.parametrize("shape", [(300, 512), (9,), (2, 3, 7)])
def test_row(shape: tuple[int, ...]) -> None:
    first, second = pair(shape, 0.6)
    rows = zip(
        first.double().numpy().reshape(-1, shape[-1]), second.double().numpy().reshape(-1, shape[-1]), strict=True
    )
    expected = np.stack([reference(*row, 0.3) for row in rows]).reshape(shape)
    assert_near(merge_tensor("nuslerp", [first, second], weight=[0.7, 0.3], nuslerp_flatten=False), expected, 3e-6)


@given(cosine=st.floats(-1, 1), t=st.floats(0, 1))
def test_coefficients_keep_the_norm_of_unit_vectors(cosine: float, t: float) -> None:
    first, second = slerp_coefficients(np.float64(cosine), t)
    if abs(cosine) < 1 - 1e-5:
        assert first**2 + second**2 + 2 * first * second * cosine == pytest.approx(1, abs=1e-6)
    back = slerp_coefficients(np.float64(cosine), 1 - t)
    np.testing.assert_allclose(back, (second, first), rtol=1e-6, atol=1e-6)


@given(cosine=st.sampled_from([1.0, 1 - 1e-9, 1 - 1e-7, 1 - 2e-6, 1 - 1e-5]), t=st.floats(0, 1))
def test_coefficients_are_continuous_where_they_become_linear(cosine: float, t: float) -> None:
    np.testing.assert_allclose(slerp_coefficients(np.float64(cosine), t), (1 - t, t), atol=1e-5)


def test_zero_vector_counts_as_orthogonal() -> None:
    vector = torch.tensor([3.0, 4.0])
    assert_near(merge_tensor("slerp", [vector, torch.zeros(2)], t=0.5), np.sqrt(0.5) * np.array([3.0, 4.0]))
    assert merge_tensor("slerp", [torch.zeros(2), torch.zeros(2)]).tolist() == [0, 0]


def test_ends_are_the_models_to_the_last_bit() -> None:
    first, second = pair((7, 33), 0.2)
    assert torch.equal(merge_tensor("slerp", [first, second], t=0), first)
    assert_near(merge_tensor("slerp", [first, second], t=1), second.double().numpy())
    assert torch.equal(merge_tensor("nuslerp", [first, second], weight=[1.0, 0.0], nuslerp_flatten=False), first)


@settings(max_examples=20)
@given(weights=st.tuples(st.floats(0, 10), st.floats(0.1, 10)))
def test_nuslerp_is_slerp_at_its_share(weights: tuple[float, float]) -> None:
    models = pair((5, 6), 0.9999)
    share = weights[1] / sum(weights)
    result = merge_tensor("nuslerp", models, weight=list(weights))
    assert torch.equal(result, merge_tensor("slerp", models, t=share, linear_above=1.0))


def test_nuslerp_refuses_weights_that_add_up_to_zero() -> None:
    with pytest.raises(UserError, match="zero"):
        merge_tensor("nuslerp", pair((3,), 0.5), weight=[0.0, 0.0])


def test_merges_two_models_only() -> None:
    with pytest.raises(UserError, match="merges 2 models"):
        merge_tensor("slerp", [torch.ones(2)] * 3)
