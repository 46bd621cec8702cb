"""Clipping by value and by norm, against torch's own."""

import pytest
import torch

from posttrain.train.config import TrainConfig
from posttrain.train.optim.master_weights import clip_gradients


def gradients(scale: float) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator) * scale for shape in ((4, 5), (7,), (2, 3, 2))]


@pytest.mark.parametrize("scale", [1e-3, 1.0, 50.0])
@pytest.mark.parametrize("value", [None, 0.5, 1.2, 1e6])
@pytest.mark.parametrize("limit", [0.3, 4.0, 1e9, None])
def test_clipping_is_by_value_then_by_norm(scale: float, value: float | None, limit: float | None) -> None:
    actual, reference = gradients(scale), [torch.nn.Parameter(torch.zeros_like(item)) for item in gradients(scale)]
    for weight, gradient in zip(reference, gradients(scale), strict=True):
        weight.grad = gradient
    norm = float(torch.nn.utils.get_total_norm(actual))
    factor = clip_gradients(actual, norm, limit, value)
    if value is not None:
        torch.nn.utils.clip_grad_value_(reference, value)
    if limit is not None:
        torch.nn.utils.clip_grad_norm_(reference, limit)
    assert factor <= 1
    for gradient, weight in zip(actual, reference, strict=True):
        torch.testing.assert_close(gradient * factor, weight.grad)


def test_clip_may_be_none() -> None:
    assert TrainConfig.read({"clip": None}, "test").clip is None


def test_without_a_value_the_gradients_are_not_touched() -> None:
    actual = gradients(50.0)
    clip_gradients(actual, 1e3, 1.0)
    assert all(torch.equal(first, other) for first, other in zip(actual, gradients(50.0), strict=True))
