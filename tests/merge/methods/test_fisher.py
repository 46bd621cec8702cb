"""Fisher-weighted averaging against the paper's formula in float64, and at its limits."""

import numpy as np
import pytest
import torch
from torch import Tensor

from posttrain.store.errors import UserError
from posttrain.testing.merge_methods import merge_tensor, merge_tensors, random_models

SHAPE = (140, 500)


def draw(models: int, shape: tuple[int, ...] = SHAPE) -> tuple[list[Tensor], list[Tensor]]:
    """Draws weights, and Fisher information over many orders of magnitude."""
    generator = torch.Generator().manual_seed(1)
    weights = [torch.randn(shape, generator=generator) for _ in range(models)]
    return weights, [torch.exp(4 * torch.randn(shape, generator=generator) - 10) for _ in range(models)]


def reference(weights: list[Tensor], fisher: list[Tensor], weight: list[float], floor: float = 0.0) -> np.ndarray:
    """Matena and Raffel 2022, equation 4: sum_i lambda_i F_i theta_i / sum_i lambda_i F_i."""
    information = [np.maximum(tensor.double().numpy(), floor) for tensor in fisher]
    total = sum(factor * part for factor, part in zip(weight, information, strict=True))
    product = sum(
        factor * part * tensor.double().numpy()
        for factor, part, tensor in zip(weight, information, weights, strict=True)
    )
    return np.asarray(product / total)


@pytest.mark.parametrize("models", [1, 2, 5])
@pytest.mark.parametrize("floor", [0.0, 1e-4])
@pytest.mark.parametrize("normalised", [True, False])
def test_formula(models: int, floor: float, normalised: bool) -> None:
    weights, fisher = draw(models)
    weight = [1.0] * models if normalised else [0.5 + number for number in range(models)]
    expected = reference(weights, fisher, weight, floor)
    result = merge_tensor("fisher", weights, statistics=fisher, weight=weight, floor=floor)
    assert np.abs(result.double().numpy() - expected).max() <= 1e-6


@pytest.mark.parametrize("scale", [1e-20, 1.0, 1e20])
def test_normalised_information_counts_alike_over_all_tensors(scale: float) -> None:
    models, _ = random_models(2, {"a": (5, 3), "b": (4, 2)})
    generator = torch.Generator().manual_seed(3)
    fisher = [
        {name: torch.rand(tensor.shape, generator=generator) for name, tensor in models[0].items()} for _ in models
    ]
    traces = [sum(float(tensor.double().sum()) for tensor in tensors.values()) for tensors in fisher]
    other = [fisher[0], {name: scale * tensor for name, tensor in fisher[1].items()}]
    merged = merge_tensors("fisher", models, statistics=other, weight=[1.0, 2.0], normalize=True)
    for name, tensor in merged.items():
        tensors, information = ([model[name] for model in source] for source in (models, fisher))
        expected = reference(tensors, information, [1 / traces[0], 2 / traces[1]])
        assert np.abs(tensor.double().numpy() - expected).max() <= 1e-6


def test_a_model_without_information_leaves_the_others_theirs() -> None:
    weights, fisher = draw(2)
    merged = merge_tensor("fisher", weights, statistics=[fisher[0], torch.zeros(SHAPE)], normalize=True)
    assert torch.allclose(merged, weights[0], rtol=0, atol=1e-6)


@pytest.mark.parametrize("scale", [1e-24, 1e30])
def test_only_ratios_of_information_count(scale: float) -> None:
    weights, fisher = draw(2)
    expected = reference(weights, fisher, [1.0, 1.0])
    result = merge_tensor("fisher", weights, statistics=[scale * tensor for tensor in fisher])
    assert np.abs(result.double().numpy() - expected).max() <= 1e-5


def test_elements_without_information_become_the_weighted_mean() -> None:
    weights, fisher = draw(3)
    nowhere = torch.rand(SHAPE, generator=torch.Generator().manual_seed(2)) < 0.3
    fisher = [tensor.masked_fill(nowhere, 0) for tensor in fisher]
    result = merge_tensor("fisher", weights, statistics=fisher, weight=[1.0, 2.0, 5.0])
    mean = sum(factor * tensor.double() for factor, tensor in zip([1, 2, 5], weights, strict=True)) / 8
    torch.testing.assert_close(result[nowhere].double(), mean[nowhere], rtol=0, atol=1e-6)
    assert (result - mean)[~nowhere].abs().max() > 1


def test_one_model_knows_an_element_alone() -> None:
    weights, fisher = draw(2)
    known = [fisher[0], torch.zeros(SHAPE)]
    assert torch.allclose(merge_tensor("fisher", weights, statistics=known), weights[0], rtol=0, atol=1e-6)
    known = [torch.zeros(SHAPE), fisher[1]]
    assert torch.allclose(merge_tensor("fisher", weights, statistics=known), weights[1], rtol=0, atol=1e-6)


def test_equal_information_is_the_mean_and_so_is_a_high_floor() -> None:
    weights, fisher = draw(3)
    mean = sum(tensor.double() for tensor in weights) / 3
    for information, floor in (([fisher[0]] * 3, 0.0), (fisher, 1e6)):
        result = merge_tensor("fisher", weights, statistics=information, floor=floor)
        torch.testing.assert_close(result.double(), mean, rtol=0, atol=1e-6)


def test_a_tensor_without_statistics_becomes_the_weighted_mean() -> None:
    models, _ = random_models(2, {"buffer": (5, 3), "weight": (4, 2)})
    fisher = [{"weight": torch.ones(4, 2)} for _ in models]
    merged = merge_tensors("fisher", models, statistics=fisher, weight=[3.0, 1.0])
    for name, tensor in merged.items():
        torch.testing.assert_close(tensor, 0.75 * models[0][name] + 0.25 * models[1][name], rtol=0, atol=1e-6)


def test_nan_information_is_named() -> None:
    weights, fisher = draw(2)
    fisher[1][3, 4] = torch.nan
    with pytest.raises(UserError, match="tensor weight holds NaN or infinite numbers"):
        merge_tensor("fisher", weights, statistics=fisher)
