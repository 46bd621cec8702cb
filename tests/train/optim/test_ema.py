"""The moving average of the weights, against its recurrence in float64."""

from collections.abc import Sequence

import pytest
import torch

from posttrain.train.optim.ema import Ema

STEPS = 40


def trajectory() -> list[list[torch.Tensor]]:
    """Two weights at the start and after each step."""
    torch.manual_seed(0)
    return [[torch.randn(3, 4), torch.randn(5)] for _ in range(STEPS + 1)]


def average_over(decay: float, weights: Sequence[Sequence[torch.Tensor]]) -> Ema:
    masters = [weight.clone() for weight in weights[0]]
    ema = Ema(decay, ["a", "b"], masters)
    for step in range(1, len(weights)):
        for master, weight in zip(masters, weights[step], strict=True):
            master.copy_(weight)
        ema.update()
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
    masters = [weight.clone() for weight in weights[0]]
    resumed = Ema(decay, ["a", "b"], masters)
    resumed.load(saved)
    for step in range(stop_step + 1, STEPS + 1):
        for master, weight in zip(masters, weights[step], strict=True):
            master.copy_(weight)
        resumed.update()
    assert resumed.updates == uninterrupted.updates
    for name, tensor in uninterrupted.tensors().items():
        assert torch.equal(resumed.tensors()[name], tensor), name


def test_the_average_is_rounded_into_the_model() -> None:
    ema = average_over(0.9, trajectory())
    model = [torch.zeros(3, 4, dtype=torch.bfloat16), torch.zeros(5)]
    ema.copy_to(model)
    assert torch.equal(model[0], ema.averages[0].bfloat16())
    assert torch.equal(model[1], ema.averages[1])
