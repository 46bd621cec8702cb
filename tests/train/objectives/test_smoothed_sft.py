"""Supervised fine-tuning with label smoothing."""

import pytest
import torch
import torch.nn.functional as functional

from posttrain.train.objectives.config import SftConfig
from posttrain.train.objectives.loss import SequenceLogProbs
from posttrain.train.objectives.sft import sft

COUNTS = torch.tensor([3, 0, 2])


def example() -> tuple[torch.Tensor, torch.Tensor, SequenceLogProbs, torch.Tensor]:
    """Logits [5, 11], targets, and the same as sequences of 3, 0 and 2 tokens."""
    logits = torch.randn(5, 11, generator=torch.Generator().manual_seed(0), dtype=torch.float64).requires_grad_()
    targets = torch.tensor([0, 10, 4, 4, 7])
    log_probs = logits.log_softmax(-1)
    owner = torch.tensor([0, 0, 0, 2, 2])
    sums = torch.zeros(3, dtype=torch.float64).index_add(0, owner, log_probs.gather(-1, targets[:, None])[:, 0])
    means = torch.zeros(3, dtype=torch.float64).index_add(0, owner, log_probs.mean(-1))
    return logits, targets, SequenceLogProbs(sums, COUNTS), means


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.75])
def test_smoothed_sft_is_torchs_cross_entropy(smoothing: float) -> None:
    logits, targets, actual, means = example()
    loss = sft(actual, SftConfig(label_smoothing=smoothing), mean_sums=means)
    expected = functional.cross_entropy(logits, targets, label_smoothing=smoothing)
    assert loss.count == 5
    torch.testing.assert_close(loss.sum / loss.count, expected)
    gradient = torch.autograd.grad(loss.sum / loss.count, logits, retain_graph=True)[0]
    torch.testing.assert_close(gradient, torch.autograd.grad(expected, logits)[0])


def test_the_unsmoothed_loss_is_a_metric() -> None:
    _, _, result, means = example()
    value, count = sft(result, SftConfig(label_smoothing=0.2), mean_sums=means).metrics["nll"]
    assert (float(value), count) == (pytest.approx(float(sft(result).sum)), 5)
    assert not value.requires_grad
    assert not sft(result, SftConfig()).metrics


def test_label_smoothing_needs_the_mean_sums() -> None:
    _, _, result, means = example()
    for mean_sums in (None, means[:2]):
        with pytest.raises(ValueError, match="label smoothing needs"):
            sft(result, SftConfig(label_smoothing=0.1), mean_sums=mean_sums)


@pytest.mark.parametrize("focal", [0.5, 1.0, 2.0])
def test_focal_sft_is_the_focal_loss_of_whole_answers(focal: float) -> None:
    logits, targets, actual, _ = example()
    weights = torch.tensor([1.0, 1.0, 0.25], dtype=torch.float64)
    loss = sft(actual, SftConfig(focal=focal), row_weights=weights)
    # The formula as the paper has it, from the probabilities themselves.
    chosen = logits.softmax(-1).gather(-1, targets[:, None])[:, 0]
    answers = torch.stack([chosen[:3].prod(), chosen[3:].prod()])
    expected = (-((1 - answers) ** focal) * answers.log() * torch.tensor([1.0, 0.25])).sum()
    assert loss.count == 3 + 0.25 * 2
    torch.testing.assert_close(loss.sum, expected)
    gradient = torch.autograd.grad(loss.sum, logits, retain_graph=True)[0]
    torch.testing.assert_close(gradient, torch.autograd.grad(expected, logits)[0])


@pytest.mark.parametrize("focal", [0.0, 0.5, 2.0])
def test_an_answer_that_is_sure_and_one_that_is_hopeless_have_finite_gradients(focal: float) -> None:
    sums = torch.tensor([0.0, -1e-9, -200.0], requires_grad=True)
    loss = sft(SequenceLogProbs(sums, torch.ones(3, dtype=torch.int64)), SftConfig(focal=focal))
    loss.sum.backward()
    assert loss.sum.isfinite()
    assert sums.grad is not None
    assert sums.grad.isfinite().all()
    assert float(loss.sum) == pytest.approx(200, rel=1e-6)
