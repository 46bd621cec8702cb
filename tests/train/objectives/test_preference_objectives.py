"""DPO and its relatives against the papers' formulas, written out in NumPy."""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy.special import log_expit

from posttrain.store.section import Section
from posttrain.train.objectives.config import CdpoConfig, DpoConfig, HingeConfig, IpoConfig, RobustDpoConfig
from posttrain.train.objectives.dpo import dpo, hinge, ipo, robust_dpo
from posttrain.train.objectives.loss import Loss, SequenceLogProbs, mean_metrics

Array = np.ndarray
# Four rows of log-probabilities (chosen, rejected and the reference's of both) and two of token counts.
quadruples = st.integers(1, 6).flatmap(
    lambda n: st.tuples(
        arrays(np.float64, (4, n), elements=st.floats(-200, 0)), arrays(np.int64, (2, n), elements=st.integers(1, 50))
    )
)


def loss(function: Callable[..., Loss], logps: Array, counts: Array, config: Section) -> Loss:
    lengths = torch.from_numpy(np.concatenate([counts, counts]))
    return function(
        *(SequenceLogProbs(torch.from_numpy(row), n) for row, n in zip(logps, lengths, strict=True)), config
    )


def difference(logps: Array) -> Array:
    chosen, rejected, reference_chosen, reference_rejected = logps
    return (chosen - reference_chosen) - (rejected - reference_rejected)


def dpo_formula(logps: Array, counts: Array, beta: float, smoothing: float) -> Array:
    logits = beta * difference(logps)
    return -(1 - smoothing) * log_expit(logits) - smoothing * log_expit(-logits)


def robust_formula(logps: Array, counts: Array, beta: float, smoothing: float) -> Array:
    logits = beta * difference(logps)
    return (-(1 - smoothing) * log_expit(logits) + smoothing * log_expit(-logits)) / (1 - 2 * smoothing)


def ipo_formula(logps: Array, counts: Array, beta: float, smoothing: float) -> Array:
    chosen, rejected, reference_chosen, reference_rejected = logps
    apart = (chosen - reference_chosen) / counts[0] - (rejected - reference_rejected) / counts[1]
    return (apart - 1 / (2 * beta)) ** 2


def hinge_formula(logps: Array, counts: Array, beta: float, smoothing: float) -> Array:
    return np.maximum(0, 1 - beta * difference(logps))


FORMULAS = {
    "dpo": (dpo, DpoConfig, dpo_formula, 0.0),
    "cdpo": (dpo, DpoConfig, dpo_formula, 0.2),
    "robust": (robust_dpo, RobustDpoConfig, robust_formula, 0.2),
    "ipo": (ipo, IpoConfig, ipo_formula, None),
    "hinge": (hinge, HingeConfig, hinge_formula, None),
}


@pytest.mark.parametrize("name", FORMULAS)
@given(quadruples, st.floats(0.01, 2))
@pytest.mark.slow
def test_against_the_papers_formula(name: str, drawn: tuple[Array, Array], beta: float) -> None:
    function, section, formula, smoothing = FORMULAS[name]
    config = section(beta=beta) if smoothing is None else section(beta=beta, label_smoothing=smoothing)
    expected = formula(*drawn, beta, smoothing or 0.0)
    actual = loss(function, *drawn, config)
    assert actual.sum.item() == pytest.approx(expected.sum(), rel=1e-9, abs=1e-9)
    assert actual.count == len(expected)


def one(chosen: float, rejected: float, reference_chosen: float, reference_rejected: float) -> tuple[Array, Array]:
    logps = [[chosen], [rejected], [reference_chosen], [reference_rejected]]
    return np.array(logps, np.float64), np.array([[4], [5]])


@pytest.mark.parametrize(
    ("function", "config", "expected"),
    [
        # The chosen's log-ratio is 2, the rejected's -1: beta d = 0.3.
        (dpo, DpoConfig(), math.log(1 + math.exp(-0.3))),
        (dpo, CdpoConfig(), 0.9 * math.log(1 + math.exp(-0.3)) + 0.1 * math.log(1 + math.exp(0.3))),
        (
            robust_dpo,
            RobustDpoConfig(),
            (0.9 * math.log(1 + math.exp(-0.3)) - 0.1 * math.log(1 + math.exp(0.3))) / 0.8,
        ),
        (ipo, IpoConfig(), (2 / 4 + 1 / 5 - 5) ** 2),
        (hinge, HingeConfig(), 0.7),
    ],
)
def test_an_example(function: Callable[..., Loss], config: Section, expected: float) -> None:
    assert loss(function, *one(-10, -20, -12, -19), config).sum.item() == pytest.approx(expected, rel=1e-12)


def test_metrics_of_an_example() -> None:
    logps = np.array([[-10.0, -5, -3], [-20.0, -4, -3], [-12.0, -5, -3], [-19.0, -6, -3]])
    result = loss(dpo, logps, np.ones((2, 3), np.int64), DpoConfig())
    assert {name: count for name, (_, count) in result.metrics.items()} == dict.fromkeys(result.metrics, 3)
    assert mean_metrics(result.metrics) == pytest.approx(
        {
            "rewards/chosen": 0.1 * (2 + 0 + 0) / 3,
            "rewards/rejected": 0.1 * (-1 + 2 + 0) / 3,
            "rewards/margins": 0.1 * (3 - 2 + 0) / 3,
            "rewards/accuracies": 1 / 3,  # a tie is no success
            "logps/chosen": -6,
            "logps/rejected": -9,
        }
    )


def swapped(logps: Array) -> Array:
    return logps[[1, 0, 3, 2]]


@given(quadruples)
def test_half_wrong_preferences_teach_nothing_of_the_order(drawn: tuple[Array, Array]) -> None:
    logps, counts = drawn
    config = DpoConfig(label_smoothing=0.5)
    there, back = loss(dpo, logps, counts, config), loss(dpo, swapped(logps), counts[::-1].copy(), config)
    assert there.sum.item() == pytest.approx(back.sum.item(), rel=1e-9)


@given(quadruples)
def test_a_vanishing_beta_forgets_the_answers(drawn: tuple[Array, Array]) -> None:
    result = loss(dpo, *drawn, DpoConfig(beta=1e-12))
    assert result.sum.item() == pytest.approx(result.count * math.log(2), rel=1e-6)


@given(quadruples, st.floats(0, 0.45))
def test_the_mean_robust_loss_over_flipped_labels_is_dpo(drawn: tuple[Array, Array], flipped: float) -> None:
    logps, counts = drawn
    config = RobustDpoConfig(label_smoothing=flipped)
    right, wrong = loss(robust_dpo, logps, counts, config), loss(robust_dpo, swapped(logps), counts, config)
    clean = loss(dpo, logps, counts, DpoConfig()).sum.item()
    assert (1 - flipped) * right.sum.item() + flipped * wrong.sum.item() == pytest.approx(clean, rel=1e-6, abs=1e-6)


@given(quadruples)
def test_ipo_goes_by_the_token(drawn: tuple[Array, Array]) -> None:
    logps, counts = drawn
    once, twice = loss(ipo, logps, counts, IpoConfig()), loss(ipo, 2 * logps, 2 * counts, IpoConfig())
    assert once.sum.item() == pytest.approx(twice.sum.item(), rel=1e-9)
    assert twice.metrics["rewards/margins"][0].item() == pytest.approx(
        2 * once.metrics["rewards/margins"][0].item(), rel=1e-9, abs=1e-9
    )


def test_ipo_is_done_where_the_log_ratios_are_far_enough_apart() -> None:
    # 1 / (2 * 0.25) = 2 nats a token: 8 over the chosen's 4 tokens, 0 over the rejected's 5.
    logps, counts = one(-4, -19, -12, -19)
    assert loss(ipo, logps, counts, IpoConfig(beta=0.25)).sum.item() == 0


def test_a_pair_that_is_its_own_reverse() -> None:
    logps = torch.tensor([-7.0, -7, -6, -6]).unbind()
    chosen, rejected = (value[None].requires_grad_() for value in logps[:2])
    count = torch.tensor([3])
    reference = [SequenceLogProbs(value[None], count) for value in logps[2:]]
    result = dpo(SequenceLogProbs(chosen, count), SequenceLogProbs(rejected, count), *reference, DpoConfig())
    result.sum.backward()
    assert result.sum.item() == pytest.approx(math.log(2))
    assert chosen.grad is not None
    assert chosen.grad.item() == pytest.approx(-0.05)
    assert rejected.grad is not None
    assert rejected.grad.item() == pytest.approx(0.05)
    assert mean_metrics(result.metrics)["rewards/accuracies"] == 0


@pytest.mark.parametrize("chosen", [-1e6, 1e6])
def test_certainty_overflows_nothing(chosen: float) -> None:
    result = loss(dpo, *one(chosen, 0, 0, 0), DpoConfig(beta=1))
    assert result.sum.item() == max(0, -chosen)


def test_sides_of_different_lengths_are_no_pairs() -> None:
    two, three = (SequenceLogProbs(torch.zeros(n), torch.ones(n).long()) for n in (2, 3))
    with pytest.raises(ValueError, match="do not go with"):
        dpo(two, three, two, three, DpoConfig())
