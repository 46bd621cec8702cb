import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from posttrain.train.objectives.config import RewardConfig
from posttrain.train.objectives.loss import mean_metrics
from posttrain.train.objectives.reward import reward

three_rows = st.integers(1, 6).flatmap(lambda n: arrays(np.float64, (3, n), elements=st.floats(-50, 50)))


@given(three_rows, st.floats(0, 1), st.booleans())
def test_reward_loss_matches_the_papers_formula(rows: np.ndarray, centring: float, with_margin: bool) -> None:
    from scipy.special import log_expit

    chosen, rejected, margin = rows
    actual = reward(
        *map(torch.from_numpy, (chosen, rejected)),
        RewardConfig(centring=centring),
        margin=torch.from_numpy(margin) if with_margin else None,
    )
    expected = -log_expit(chosen - rejected - (margin if with_margin else 0)) + centring * (chosen + rejected) ** 2
    assert actual.sum.item() == pytest.approx(expected.sum(), rel=1e-9, abs=1e-9)
    assert actual.count == len(chosen)


@given(three_rows, st.floats(-100, 100))
def test_only_differences_of_rewards_matter(rows: np.ndarray, shift: float) -> None:
    chosen, rejected, _ = torch.from_numpy(rows)
    loss = reward(chosen, rejected, RewardConfig())
    shifted_loss = reward(chosen + shift, rejected + shift, RewardConfig())
    assert loss.sum.item() == pytest.approx(shifted_loss.sum.item(), rel=1e-6, abs=1e-6)


def test_reward_loss_of_an_example() -> None:
    chosen, rejected = torch.tensor([2.0, 1.0]), torch.tensor([1.0, 1.0])
    result = reward(chosen, rejected, RewardConfig(centring=0.1), margin=torch.tensor([0.5, 0.0]))
    assert result.sum.item() == pytest.approx(math.log(1 + math.exp(-0.5)) + math.log(2) + 0.1 * (9 + 4))
    assert mean_metrics(result.metrics) == {
        "rewards/chosen": 1.5,
        "rewards/rejected": 1.0,
        "rewards/margins": 0.5,
        "rewards/accuracies": 0.5,
    }


def test_half_precision_rewards_are_compared_in_float32() -> None:
    chosen = torch.tensor([100.0, 3.0], dtype=torch.bfloat16, requires_grad=True)
    result = reward(chosen, torch.tensor([99.5, 2.0], dtype=torch.bfloat16), RewardConfig())
    assert result.sum.dtype == torch.float32
    assert result.sum.item() == pytest.approx(math.log(1 + math.exp(-0.5)) + math.log(1 + math.exp(-1)), rel=1e-6)
    result.sum.backward()
    assert chosen.grad is not None


@pytest.mark.parametrize(
    ("chosen", "rejected", "margin"), [((2,), (1,), None), ((2, 1), (2, 1), None), ((2,), (2,), (1,))]
)
def test_shapes_that_would_broadcast_are_refused(
    chosen: tuple[int, ...], rejected: tuple[int, ...], margin: tuple[int, ...] | None
) -> None:
    with pytest.raises(ValueError, match="vectors of one length"):
        reward(
            torch.zeros(chosen),
            torch.zeros(rejected),
            RewardConfig(),
            margin=None if margin is None else torch.zeros(margin),
        )
