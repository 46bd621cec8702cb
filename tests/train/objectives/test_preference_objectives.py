"""DPO and its relatives against the papers' formulas, written out in NumPy."""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from posttrain.store.section import Section
from posttrain.train.objectives.config import DpoConfig, HingeConfig, IpoConfig, RobustDpoConfig
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
    from scipy.special import log_expit

    logits = beta * difference(logps)
    return -(1 - smoothing) * log_expit(logits) - smoothing * log_expit(-logits)


def robust_formula(logps: Array, counts: Array, beta: float, smoothing: float) -> Array:
    from scipy.special import log_expit

    logits = beta * difference(logps)
    return (-(1 - smoothing) * log_expit(logits) + smoothing * log_expit(-logits)) / (1 - 2 * smoothing)


def ipo_formula(logps: Array, counts: Array, beta: float, smoothing: float) -> Array:
    chosen, rejected, reference_chosen, reference_rejected = logps
    difference_per_token = (chosen - reference_chosen) / counts[0] - (rejected - reference_rejected) / counts[1]
    return (difference_per_token - 1 / (2 * beta)) ** 2


def hinge_formula(logps: Array, counts: Array, beta: float, smoothing: float) -> Array:
    return np.maximum(0, 1 - beta * difference(logps))


FORMULAS = {
    "dpo": (dpo, DpoConfig, dpo_formula, 0.0),
    "smoothed dpo": (dpo, DpoConfig, dpo_formula, 0.2),
    "robust": (robust_dpo, RobustDpoConfig, robust_formula, 0.2),
    "ipo": (ipo, IpoConfig, ipo_formula, None),
    "hinge": (hinge, HingeConfig, hinge_formula, None),
}


@pytest.mark.parametrize("name", FORMULAS)
@given(quadruples, st.floats(0.01, 2))
@pytest.mark.slow
def test_preference_losses_match_the_papers_formulas(name: str, batch: tuple[Array, Array], beta: float) -> None:
    function, section, formula, smoothing = FORMULAS[name]
    config = section(beta=beta) if smoothing is None else section(beta=beta, label_smoothing=smoothing)
    expected = formula(*batch, beta, smoothing or 0.0)
    actual = loss(function, *batch, config)
    assert actual.sum.item() == pytest.approx(expected.sum(), rel=1e-9, abs=1e-9)
    assert actual.count == len(expected)


def single_pair(
    chosen: float, rejected: float, reference_chosen: float, reference_rejected: float
) -> tuple[Array, Array]:
    logps = [[chosen], [rejected], [reference_chosen], [reference_rejected]]
    return np.array(logps, np.float64), np.array([[4], [5]])


@pytest.mark.parametrize(
    ("function", "config", "expected"),
    [
        # The chosen's log-ratio is 2, the rejected's -1: beta d = 0.3.
        (dpo, DpoConfig(), math.log(1 + math.exp(-0.3))),
        (dpo, DpoConfig(label_smoothing=0.1), 0.9 * math.log(1 + math.exp(-0.3)) + 0.1 * math.log(1 + math.exp(0.3))),
        (
            robust_dpo,
            RobustDpoConfig(),
            (0.9 * math.log(1 + math.exp(-0.3)) - 0.1 * math.log(1 + math.exp(0.3))) / 0.8,
        ),
        (ipo, IpoConfig(), (2 / 4 + 1 / 5 - 5) ** 2),
        (hinge, HingeConfig(), 0.7),
    ],
)
def test_preference_losses_of_an_example(function: Callable[..., Loss], config: Section, expected: float) -> None:
    assert loss(function, *single_pair(-10, -20, -12, -19), config).sum.item() == pytest.approx(expected, rel=1e-12)


def test_metrics_of_an_example() -> None:
    logps = np.array([[-10.0, -5, -3], [-20.0, -4, -3], [-12.0, -5, -3], [-19.0, -6, -3]])
    result = loss(dpo, logps, np.ones((2, 3), np.int64), DpoConfig())
    assert {name: count for name, (_, count) in result.metrics.items()} == dict.fromkeys(result.metrics, 3)
    assert mean_metrics(result.metrics) == pytest.approx(
        {
            "rewards/chosen": 0.1 * (2 + 0 + 0) / 3,
            "rewards/rejected": 0.1 * (-1 + 2 + 0) / 3,
            "rewards/margins": 0.1 * (3 - 2 + 0) / 3,
            "rewards/accuracies": 1 / 3,  # a tie is not a success
            "logps/chosen": -6,
            "logps/rejected": -9,
        }
    )


def swap_answers(logps: Array) -> Array:
    return logps[[1, 0, 3, 2]]


@given(quadruples)
def test_at_half_smoothing_the_order_does_not_matter(batch: tuple[Array, Array]) -> None:
    logps, counts = batch
    config = DpoConfig(label_smoothing=0.5)
    forward, backward = loss(dpo, logps, counts, config), loss(dpo, swap_answers(logps), counts[::-1].copy(), config)
    assert forward.sum.item() == pytest.approx(backward.sum.item(), rel=1e-9)


@given(quadruples)
def test_a_vanishing_beta_gives_log_2(batch: tuple[Array, Array]) -> None:
    result = loss(dpo, *batch, DpoConfig(beta=1e-12))
    assert result.sum.item() == pytest.approx(result.count * math.log(2), rel=1e-6)


@given(quadruples, st.floats(0, 0.45))
def test_the_robust_loss_averaged_over_flipped_labels_is_dpo(batch: tuple[Array, Array], flip_rate: float) -> None:
    logps, counts = batch
    config = RobustDpoConfig(label_smoothing=flip_rate)
    correct_loss, flipped_loss = (
        loss(robust_dpo, logps, counts, config),
        loss(robust_dpo, swap_answers(logps), counts, config),
    )
    expected = loss(dpo, logps, counts, DpoConfig()).sum.item()
    assert (1 - flip_rate) * correct_loss.sum.item() + flip_rate * flipped_loss.sum.item() == pytest.approx(
        expected, rel=1e-6, abs=1e-6
    )


@given(quadruples)
def test_ipo_is_normalised_by_length(batch: tuple[Array, Array]) -> None:
    logps, counts = batch
    single, doubled = loss(ipo, logps, counts, IpoConfig()), loss(ipo, 2 * logps, 2 * counts, IpoConfig())
    assert single.sum.item() == pytest.approx(doubled.sum.item(), rel=1e-9)
    assert doubled.metrics["rewards/margins"][0].item() == pytest.approx(
        2 * single.metrics["rewards/margins"][0].item(), rel=1e-9, abs=1e-9
    )


def test_ipo_is_zero_at_its_target_margin() -> None:
    # 1 / (2 * 0.25) = 2 nats per token: 8 over the chosen's 4 tokens, 0 over the rejected's 5.
    logps, counts = single_pair(-4, -19, -12, -19)
    assert loss(ipo, logps, counts, IpoConfig(beta=0.25)).sum.item() == 0


def test_equal_log_ratios_give_log_2() -> None:
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
def test_extreme_log_ratios_do_not_overflow(chosen: float) -> None:
    result = loss(dpo, *single_pair(chosen, 0, 0, 0), DpoConfig(beta=1))
    assert result.sum.item() == max(0, -chosen)


def test_different_numbers_of_answers_are_refused() -> None:
    two_sequences, three_sequences = (SequenceLogProbs(torch.zeros(n), torch.ones(n).long()) for n in (2, 3))
    with pytest.raises(ValueError, match="do not go with"):
        dpo(two_sequences, three_sequences, two_sequences, three_sequences, DpoConfig())
