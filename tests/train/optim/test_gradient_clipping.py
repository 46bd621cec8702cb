"""Clipping by norm, against torch's own."""

import pytest
import torch

from posttrain.train.config import TrainConfig
from posttrain.train.optim.master_weights import clip_factor


@pytest.mark.parametrize("scale", [1e-3, 1.0, 50.0])
@pytest.mark.parametrize("limit", [0.3, 4.0, 1e9, None])
def test_the_factor_is_torchs(scale: float, limit: float | None) -> None:
    generator = torch.Generator().manual_seed(0)
    gradients = [torch.randn(shape, generator=generator) * scale for shape in ((4, 5), (7,), (2, 3, 2))]
    weights = [torch.nn.Parameter(torch.zeros_like(gradient)) for gradient in gradients]
    for weight, gradient in zip(weights, gradients, strict=True):
        weight.grad = gradient.clone()
    factor = clip_factor(float(torch.nn.utils.get_total_norm(gradients)), limit)
    if limit is not None:
        torch.nn.utils.clip_grad_norm_(weights, limit)
    assert factor <= 1
    for gradient, weight in zip(gradients, weights, strict=True):
        torch.testing.assert_close(gradient * factor, weight.grad)


def test_clip_may_be_none() -> None:
    assert TrainConfig.read({"clip": None}, "test").clip is None
