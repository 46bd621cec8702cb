"""The moving average of the weights, against its recurrence in float64."""

from collections.abc import Sequence

import pytest
import torch

from posttrain.store.errors import UserError
from posttrain.train.optim.config import EmaConfig
from posttrain.train.optim.ema import Ema

STEPS = 40


def trajectory() -> list[list[torch.Tensor]]:
    """Two weights at the start and after each step."""
    torch.manual_seed(0)
    return [[torch.randn(3, 4), torch.randn(5)] for _ in range(STEPS + 1)]


def average_over(config: EmaConfig, weights: Sequence[Sequence[torch.Tensor]]) -> Ema:
    masters = [weight.clone() for weight in weights[0]]
    ema = Ema(config, ["a", "b"], masters)
    for step in range(1, len(weights)):
        for master, weight in zip(masters, weights[step], strict=True):
            master.copy_(weight)
        ema.update(step)
    return ema


@pytest.mark.parametrize("decay", [0.0, 0.5, 0.999])
@pytest.mark.parametrize(("start", "every"), [(0, 1), (7, 1), (0, 3), (7, 4)])
def test_the_average_follows_its_recurrence(decay: float, start: int, every: int) -> None:
    weights = trajectory()
    ema = average_over(EmaConfig(decay=decay, start=start, every=every), weights)
    for index in range(2):
        expected, updates = weights[start][index].double(), 0
        for step in range(start + every, STEPS + 1, every):
            current_decay = min(decay, (1 + updates) / (10 + updates))
            expected = current_decay * expected + (1 - current_decay) * weights[step][index].double()
            updates += 1
        torch.testing.assert_close(ema.averages[index].double(), expected, atol=1e-6, rtol=1e-6)
        assert ema.updates == updates > 5


def test_the_average_starts_from_the_weights_at_start() -> None:
    weights = trajectory()
    ema = average_over(EmaConfig(decay=0.9, start=30), weights[:31])
    assert torch.equal(ema.averages[0], weights[30][0])
    assert ema.updates == 0


def test_a_skipped_step_at_the_start_is_allowed() -> None:
    masters = [torch.zeros(2)]
    ema = Ema(EmaConfig(decay=0.9, start=3), ["a"], masters)
    for step in (1, 2, 4):  # step 3 overflowed, so it changed nothing and was not reported
        masters[0].fill_(step)
        ema.update(step)
    torch.testing.assert_close(ema.averages[0], torch.full((2,), 0.1 * 2 + 0.9 * 4))


@pytest.mark.parametrize("stop_step", [0, 3, 7, 8, 25])
def test_the_average_resumes(stop_step: int) -> None:
    weights, config = trajectory(), EmaConfig(decay=0.99, start=7, every=2)
    uninterrupted = average_over(config, weights)
    interrupted = average_over(config, weights[: stop_step + 1])
    saved = {name: tensor.clone() for name, tensor in interrupted.tensors().items()}
    masters = [weight.clone() for weight in weights[0]]
    resumed = Ema(config, ["a", "b"], masters)
    resumed.load(saved)
    for step in range(stop_step + 1, STEPS + 1):
        for master, weight in zip(masters, weights[step], strict=True):
            master.copy_(weight)
        resumed.update(step)
    assert resumed.updates == uninterrupted.updates
    for name, tensor in uninterrupted.tensors().items():
        assert torch.equal(resumed.tensors()[name], tensor), name


def test_the_average_is_rounded_into_the_model() -> None:
    ema = average_over(EmaConfig(decay=0.9), trajectory())
    model = [torch.zeros(3, 4, dtype=torch.bfloat16), torch.zeros(5)]
    ema.copy_to(model)
    assert torch.equal(model[0], ema.averages[0].bfloat16())
    assert torch.equal(model[1], ema.averages[1])


def test_an_average_that_never_starts_is_refused() -> None:
    config = EmaConfig(decay=0.9, start=10, every=5)
    config.check(15)
    with pytest.raises(UserError, match=r"train\.ema\.start: the average would first be updated after 15 steps"):
        config.check(14)
    config.model_copy(update={"save": False}).check(14)
    EmaConfig(start=100).check(1)
