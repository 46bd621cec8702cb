"""Fused operations against their formulas in float64."""

import pytest
import torch
from torch import Tensor

from posttrain.models import fused
from posttrain.models.fused import rms_norm, rms_norm_reference, rotate
from posttrain.models.fused_lora import lora_linear

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


def reference_norm(states: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    return weight * states / (states.pow(2).mean(-1, keepdim=True) + epsilon).sqrt()


def gradients(outputs: Tensor, inputs: list[Tensor]) -> list[Tensor]:
    output_gradients = torch.randn(outputs.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return list(torch.autograd.grad(outputs, inputs, output_gradients.to(outputs.dtype)))


def random_tensor(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype).requires_grad_()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("numbers", [1, 40, 1 << 17])  # rows per block: one, some and all
def test_norm_matches_its_formula(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, numbers: int) -> None:
    monkeypatch.setattr(fused, "_NUMBERS", numbers)
    inputs = [random_tensor(2, 5, 16, dtype=dtype), random_tensor(16, dtype=dtype)]
    doubles = [first.detach().double().requires_grad_() for first in inputs]
    actual, expected = rms_norm(*inputs, 1e-5, dtype), reference_norm(*doubles, 1e-5)
    assert actual.dtype == dtype
    torch.testing.assert_close(actual.double(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    torch.testing.assert_close(
        rms_norm_reference(*inputs, 1e-5, dtype), actual, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype]
    )
    for first, other in zip(gradients(actual, inputs), gradients(expected, doubles), strict=True):
        torch.testing.assert_close(first.double(), other, rtol=TOLERANCE[dtype], atol=2 * TOLERANCE[dtype])


def test_a_norm_does_not_change_its_input() -> None:
    states, weight = random_tensor(3, 8, dtype=torch.float32), random_tensor(8, dtype=torch.float32)
    before = states.detach().clone()
    gradients(rms_norm(states, weight, 1e-5, torch.float32), [states, weight])
    assert torch.equal(states, before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rotation_is_that_of_complex_numbers(dtype: torch.dtype) -> None:
    # Transposed, so that the heads are strided.
    states = random_tensor(1, 7, 3, 8, dtype=dtype).transpose(1, 2).detach().requires_grad_()
    angle = torch.linspace(0, 3, 7 * 4, dtype=torch.float64).view(1, 1, 7, 4)
    double = states.detach().double().requires_grad_()
    rotated = torch.complex(double[..., :4], double[..., 4:]) * torch.polar(torch.ones_like(angle), angle)
    expected = torch.cat([rotated.real, rotated.imag], -1)
    actual = rotate(states, *(part.repeat(1, 1, 1, 2).to(dtype) for part in (angle.cos(), angle.sin())))
    assert actual.stride() == states.stride()
    torch.testing.assert_close(actual.double(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    (gradient,), (expected_gradient,) = gradients(actual, [states]), gradients(expected, [double])
    torch.testing.assert_close(gradient.double(), expected_gradient, rtol=TOLERANCE[dtype], atol=2 * TOLERANCE[dtype])


@pytest.mark.parametrize("separate_input", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_linear_layer_with_an_adapter_matches_its_formula(dtype: torch.dtype, separate_input: bool) -> None:
    states, adapter_input = random_tensor(2, 5, 6, dtype=dtype), random_tensor(2, 5, 6, dtype=dtype)
    down, up = random_tensor(3, 6, dtype=torch.float32), random_tensor(8, 3, dtype=torch.float32)
    weight, bias = random_tensor(8, 6, dtype=dtype).detach(), random_tensor(8, dtype=dtype).detach()
    inputs = [states, *([adapter_input] if separate_input else []), down, up]
    doubles = [first.detach().double().requires_grad_() for first in inputs]
    actual = lora_linear(states, adapter_input if separate_input else states, weight, bias, down, up, 0.5)
    expected = doubles[0] @ weight.double().T + bias.double() + 0.5 * doubles[-3] @ doubles[-2].T @ doubles[-1].T
    assert actual.dtype == dtype
    tolerance = 3 * TOLERANCE[dtype]  # it is rounded after each product
    torch.testing.assert_close(actual.double(), expected, rtol=tolerance, atol=tolerance)
    result = gradients(actual, inputs)
    assert [first.dtype for first in result] == [first.dtype for first in inputs]
    for first, other in zip(result, gradients(expected, doubles), strict=True):
        torch.testing.assert_close(first.double(), other, rtol=tolerance, atol=3 * tolerance)
