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
    with pytest.raises(UserError, match="merges 1 models"):
        merge_tensor("passthrough", [model, model])


@settings(max_examples=25)
@given(
    weight=st.lists(st.floats(0.01, 10), min_size=1, max_size=4), strength=st.one_of(st.just(0.0), st.floats(0.01, 10))
)
def test_regularized_mean_has_no_gradient_of_its_objective(weight: list[float], strength: float) -> None:
    generator = torch.Generator().manual_seed(len(weight))
    base, *models = torch.randn(len(weight) + 1, 3, 5, generator=generator)
    result = merge_tensor("regularized_mean", models, base, weight=weight, strength=strength).double()
    gradient = strength * (result - base.double())
    for factor, model in zip(weight, models, strict=True):
        gradient += factor * (result - model.double())
    assert gradient.abs().max() <= 1e-5 * (sum(weight) + strength)


def test_regularized_mean_leads_from_the_mean_to_the_base() -> None:
    base, *models = torch.randn(3, 4, 5, generator=torch.Generator().manual_seed(0))
    mean = merge_tensor("linear", models)
    torch.testing.assert_close(merge_tensor("regularized_mean", models, base, strength=0.0), mean)
    torch.testing.assert_close(merge_tensor("regularized_mean", models, base, strength=1e9), base)
    # Two models of weight 1 and a base of weight 2.
    torch.testing.assert_close(merge_tensor("regularized_mean", models, base, strength=2.0), (mean + base) / 2)


@pytest.mark.parametrize("options", [{"strength": -1.0}, {"weight": -1.0}, {"weight": 0.0, "strength": 0.0}])
def test_regularized_mean_refuses_what_has_no_minimum(options: dict[str, float]) -> None:
    with pytest.raises(UserError):
        merge_tensor("regularized_mean", [torch.ones(2)] * 2, torch.zeros(2), **options)


def test_regularized_mean_refuses_infinite_strength() -> None:
    with pytest.raises(UserError):
        merge_tensor("regularized_mean", [torch.ones(2)], torch.zeros(2), strength=np.inf)
