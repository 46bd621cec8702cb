"""Linear combinations against float64."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.store.errors import UserError
from posttrain.testing.merge_methods import merge_tensor

WEIGHTS = st.lists(st.floats(-3, 3), min_size=1, max_size=5)


def draw(models: int, shape: tuple[int, ...] = (5, 7)) -> list[torch.Tensor]:
    return list(torch.randn(models, *shape, generator=torch.Generator().manual_seed(models)))


def weighted_sum(weight: list[float], tensors: list[torch.Tensor]) -> np.ndarray:
    total: np.ndarray = np.tensordot(np.array(weight), np.stack([tensor.double().numpy() for tensor in tensors]), 1)
    return total


def assert_near(result: torch.Tensor, expected: np.ndarray, scale: float) -> None:
    assert np.abs(result.double().numpy() - expected).max() <= 1e-6 * max(scale, 1.0)


@settings(max_examples=25)
@given(weight=WEIGHTS)
def test_linear_without_normalisation_is_the_sum(weight: list[float]) -> None:
    models = draw(len(weight))
    result = merge_tensor("linear", models, weight=weight, normalize=False)
    assert_near(result, weighted_sum(weight, models), 4 * sum(map(abs, weight)))


@settings(max_examples=25)
@given(weight=WEIGHTS.filter(lambda weight: abs(sum(weight)) > 0.1))
def test_linear_is_the_weighted_average(weight: list[float]) -> None:
    models = draw(len(weight))
    expected = weighted_sum(weight, models) / sum(weight)
    assert_near(merge_tensor("linear", models, weight=weight), expected, 4 * sum(map(abs, weight)) / abs(sum(weight)))


@pytest.mark.parametrize("weight", [[1.0, -1.0], [0.0, 0.0], [1e9, -1e9 + 1e-3]])
def test_weights_that_add_up_to_zero_are_refused(weight: list[float]) -> None:
    with pytest.raises(UserError, match="zero"):
        merge_tensor("linear", draw(2), weight=weight)


@settings(max_examples=25)
@given(weight=WEIGHTS, scale=st.floats(-2, 2))
def test_task_arithmetic_adds_task_vectors(weight: list[float], scale: float) -> None:
    base, *models = draw(len(weight) + 1)
    expected = base.double().numpy() + scale * weighted_sum(
        weight, [model.double() - base.double() for model in models]
    )
    result = merge_tensor("task_arithmetic", models, base, weight=weight, scale=scale)
    assert_near(result, expected, 16 * sum(map(abs, weight)))


def test_task_arithmetic_forgets_and_makes_analogies() -> None:
    base, first = draw(2)
    torch.testing.assert_close(merge_tensor("task_arithmetic", [first], base, weight=-1.0), 2 * base - first)
    one, two, three = draw(3)
    expected = base + (one - base) + (two - base) - (three - base)
    result = merge_tensor("task_arithmetic", [one, two, three], base, weight=[1.0, 1.0, -1.0])
    torch.testing.assert_close(result, expected)


def test_normalised_task_arithmetic_is_the_average() -> None:
    base, *models = draw(4)
    result = merge_tensor("task_arithmetic", models, base, weight=[1.0, 2.0, 3.0], normalize=True)
    torch.testing.assert_close(result, merge_tensor("linear", models, weight=[1.0, 2.0, 3.0]))


def test_passthrough_scales_one_model() -> None:
    (model,) = draw(1)
    assert torch.equal(merge_tensor("passthrough", [model]), model)
    assert torch.equal(merge_tensor("passthrough", [model], scale=0.5), 0.5 * model)
    assert not merge_tensor("passthrough", [model], scale=0.0).any()
    with pytest.raises(UserError, match="merges 1 model"):
        merge_tensor("passthrough", [model, model])
