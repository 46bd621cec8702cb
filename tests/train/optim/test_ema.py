"""The moving average of the weights, against its recurrence in float64."""

from collections.abc import Sequence

import pytest
import torch
from torch import nn

from posttrain.train.optim.config import OptimizerConfig
from posttrain.train.optim.ema import Ema
from posttrain.train.optim.master_weights import MasterWeights

STEPS = 40


def trajectory() -> list[list[torch.Tensor]]:
    """Two weights at the start and after each step."""
    torch.manual_seed(0)
    return [[torch.randn(3, 4), torch.randn(5)] for _ in range(STEPS + 1)]


def weights_at(start: Sequence[torch.Tensor], dtype: torch.dtype = torch.float32) -> MasterWeights:
    """The weights of a model with these parameters."""
    model = nn.ParameterDict({"a": start[0].clone(), "b": start[1].clone()}).to(dtype)
    return MasterWeights(model, OptimizerConfig())


def follow(ema: Ema, weights: MasterWeights, steps: Sequence[Sequence[torch.Tensor]]) -> None:
    """Moves the weights through these values, and updates the average at each."""
    for values in steps:
        for master, value in zip(weights.masters, values, strict=True):
            master.data.copy_(value)
        ema.updated(0, 1.0)


def average_over(decay: float, values: Sequence[Sequence[torch.Tensor]]) -> Ema:
    weights = weights_at(values[0])
    ema = Ema(decay, weights)
    follow(ema, weights, values[1:])
    return ema


@pytest.mark.parametrize("decay", [0.0, 0.5, 0.999])
def test_the_average_follows_its_recurrence(decay: float) -> None:
    weights = trajectory()
    ema = average_over(decay, weights)
    assert ema.updates == STEPS
    for index in range(2):
        expected = weights[0][index].double()
        for update in range(STEPS):
            current_decay = min(decay, (1 + update) / (10 + update))
            expected = current_decay * expected + (1 - current_decay) * weights[update + 1][index].double()
        torch.testing.assert_close(ema.averages[index].double(), expected, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("stop_step", [0, 3, 7, 8, 25])
def test_the_average_resumes(stop_step: int) -> None:
    weights, decay = trajectory(), 0.99
    uninterrupted = average_over(decay, weights)
    interrupted = average_over(decay, weights[: stop_step + 1])
    saved = {name: tensor.clone() for name, tensor in interrupted.tensors().items()}
    masters = weights_at(weights[0])
    resumed = Ema(decay, masters)
    resumed.load(saved)
    follow(resumed, masters, weights[stop_step + 1 :])
    assert resumed.updates == uninterrupted.updates
    for name, tensor in uninterrupted.tensors().items():
        assert torch.equal(resumed.tensors()[name], tensor), name


def test_the_average_is_rounded_into_the_model() -> None:
    values = trajectory()
    weights = weights_at(values[0], torch.bfloat16)
    ema = Ema(0.9, weights)
    follow(ema, weights, values[1:])
    averages = [average.clone() for average in ema.averages]
    ema.end()
    for weight, average in zip(weights.weights, averages, strict=True):
        assert torch.equal(weight.detach(), average.bfloat16())
