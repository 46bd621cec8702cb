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
def test_value_then_norm(scale: float, value: float | None, limit: float | None) -> None:
    ours, theirs = gradients(scale), [torch.nn.Parameter(torch.zeros_like(item)) for item in gradients(scale)]
    for weight, gradient in zip(theirs, gradients(scale), strict=True):
        weight.grad = gradient
    norm = float(torch.nn.utils.get_total_norm(ours))
    factor = clip_gradients(ours, norm, limit, value)
    if value is not None:
        torch.nn.utils.clip_grad_value_(theirs, value)
    if limit is not None:
        torch.nn.utils.clip_grad_norm_(theirs, limit)
    assert factor <= 1
    for gradient, weight in zip(ours, theirs, strict=True):
        torch.testing.assert_close(gradient * factor, weight.grad)


def test_no_limit_is_a_setting() -> None:
    assert TrainConfig.read({"clip": None}, "test").clip is None


def test_without_a_value_the_gradients_are_not_touched() -> None:
    ours = gradients(50.0)
    clip_gradients(ours, 1e3, 1.0)
    assert all(torch.equal(first, other) for first, other in zip(ours, gradients(50.0), strict=True))
