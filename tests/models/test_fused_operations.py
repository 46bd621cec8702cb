"""Fused operations against their formulas in float64."""

import pytest
import torch
from torch import Tensor

from posttrain.models import fused
from posttrain.models.fused import rms_norm, rms_norm_reference, rotate
from posttrain.models.fused_lora import lora_linear

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


def normed(states: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    return weight * states / (states.pow(2).mean(-1, keepdim=True) + epsilon).sqrt()


def gradients(found: Tensor, inputs: list[Tensor]) -> list[Tensor]:
    above = torch.randn(found.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return list(torch.autograd.grad(found, inputs, above.to(found.dtype)))


def drawn(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype).requires_grad_()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("numbers", [1, 40, 1 << 17])  # rows a block: one, some and all
def test_norm(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, numbers: int) -> None:
    monkeypatch.setattr(fused, "_NUMBERS", numbers)
    inputs = [drawn(2, 5, 16, dtype=dtype), drawn(16, dtype=dtype)]
    doubles = [first.detach().double().requires_grad_() for first in inputs]
    ours, exact = rms_norm(*inputs, 1e-5, dtype), normed(*doubles, 1e-5)
    assert ours.dtype == dtype
    torch.testing.assert_close(ours.double(), exact, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    torch.testing.assert_close(
        rms_norm_reference(*inputs, 1e-5, dtype), ours, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype]
    )
    for first, other in zip(gradients(ours, inputs), gradients(exact, doubles), strict=True):
        torch.testing.assert_close(first.double(), other, rtol=TOLERANCE[dtype], atol=2 * TOLERANCE[dtype])


def test_a_norm_leaves_its_input_as_it_is() -> None:
    states, weight = drawn(3, 8, dtype=torch.float32), drawn(8, dtype=torch.float32)
    before = states.detach().clone()
    gradients(rms_norm(states, weight, 1e-5, torch.float32), [states, weight])
    assert torch.equal(states, before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rotation_is_that_of_complex_numbers(dtype: torch.dtype) -> None:
    states = drawn(1, 7, 3, 8, dtype=dtype).transpose(1, 2).detach().requires_grad_()  # heads lie between tokens
    angle = torch.linspace(0, 3, 7 * 4, dtype=torch.float64).view(1, 1, 7, 4)
    double = states.detach().double().requires_grad_()
    turned = torch.complex(double[..., :4], double[..., 4:]) * torch.polar(torch.ones_like(angle), angle)
    exact = torch.cat([turned.real, turned.imag], -1)
    ours = rotate(states, *(part.repeat(1, 1, 1, 2).to(dtype) for part in (angle.cos(), angle.sin())))
    assert ours.stride() == states.stride()
    torch.testing.assert_close(ours.double(), exact, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    (item,), (other,) = gradients(ours, [states]), gradients(exact, [double])
    torch.testing.assert_close(item.double(), other, rtol=TOLERANCE[dtype], atol=2 * TOLERANCE[dtype])


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_linear_layer_with_an_adapter(dtype: torch.dtype, apart: bool) -> None:
    states, read = drawn(2, 5, 6, dtype=dtype), drawn(2, 5, 6, dtype=dtype)
    down, up = drawn(3, 6, dtype=torch.float32), drawn(8, 3, dtype=torch.float32)
    weight, bias = drawn(8, 6, dtype=dtype).detach(), drawn(8, dtype=dtype).detach()
    inputs = [states, *([read] if apart else []), down, up]
    doubles = [first.detach().double().requires_grad_() for first in inputs]
    ours = lora_linear(states, read if apart else states, weight, bias, down, up, 0.5)
    exact = doubles[0] @ weight.double().T + bias.double() + 0.5 * doubles[-3] @ doubles[-2].T @ doubles[-1].T
    assert ours.dtype == dtype
    tolerance = 3 * TOLERANCE[dtype]  # it is rounded after each product
    torch.testing.assert_close(ours.double(), exact, rtol=tolerance, atol=tolerance)
    result = gradients(ours, inputs)
    assert [first.dtype for first in result] == [first.dtype for first in inputs]
    for first, other in zip(result, gradients(exact, doubles), strict=True):
        torch.testing.assert_close(first.double(), other, rtol=tolerance, atol=3 * tolerance)
