"""The mean log-probability over the vocabulary, against torch's cross-entropy with label smoothing."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as functional

from posttrain.models import head
from posttrain.models.head import token_and_mean_log_probabilities, token_log_probabilities
from posttrain.models.language_model import LanguageModel, load_language_model
from posttrain.models.task import TaskConfig

WEIGHTS = torch.tensor([1.0, -2.0, 0.5, 0.0, 3.0, 1.0])


@pytest.fixture
def lm(tiny_model: Path) -> LanguageModel:
    return load_language_model(tiny_model, TaskConfig(), "float32")


def states_and_targets(lm: LanguageModel, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    size, width = lm.model.get_output_embeddings().weight.shape
    states = torch.randn(6, width, generator=torch.Generator().manual_seed(0)) * scale
    return states.requires_grad_(), torch.tensor([0, 1, size - 1, 5, 5, 100])


@pytest.mark.parametrize("chunk", [7, 64, 100_000])
@pytest.mark.parametrize("scale", [1.0, 80.0])
@pytest.mark.parametrize("smoothing", [0.1, 0.9])
def test_loss_and_gradient_are_torchs(
    lm: LanguageModel, monkeypatch: pytest.MonkeyPatch, chunk: int, scale: float, smoothing: float
) -> None:
    monkeypatch.setattr(head, "_VOCABULARY_CHUNK", chunk)
    weight = lm.model.get_output_embeddings().weight
    states, targets = states_and_targets(lm, scale)
    result, mean = token_and_mean_log_probabilities(lm, states, targets)
    assert result.dtype == mean.dtype == torch.float32
    losses = -(1 - smoothing) * result - smoothing * mean
    (losses * WEIGHTS).sum().backward()

    double_states, double_weight = states.detach().double().requires_grad_(), weight.detach().double().requires_grad_()
    expected = functional.cross_entropy(
        double_states @ double_weight.T, targets, reduction="none", label_smoothing=smoothing
    )
    (expected * WEIGHTS).sum().backward()
    torch.testing.assert_close(losses.double(), expected, atol=1e-4, rtol=1e-5)
    torch.testing.assert_close(states.grad.double(), double_states.grad, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(weight.grad.double(), double_weight.grad, atol=1e-4 * scale, rtol=1e-4)


def test_token_log_probabilities_do_not_depend_on_the_mean(lm: LanguageModel) -> None:
    results = []
    for with_mean in (True, False):
        states, targets = states_and_targets(lm, 1.0)
        result = (
            token_and_mean_log_probabilities(lm, states, targets)[0]
            if with_mean
            else token_log_probabilities(lm, states, targets)
        )
        (result * WEIGHTS).sum().backward()
        results.append((result.detach(), states.grad))
    for actual, expected in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize(("name", "value"), [("final_logit_softcapping", 5.0), ("logits_scaling", 4.0)])
def test_smoothing_after_capped_or_scaled_logits(lm: LanguageModel, name: str, value: float, monkeypatch: Any) -> None:
    setattr(lm.model.config, name, value)
    monkeypatch.setattr(head, "_ROW_CHUNK", 4)
    states, targets = states_and_targets(lm, 1.0)
    result, mean = token_and_mean_log_probabilities(lm, states, targets)
    expected = functional.cross_entropy(lm.logits(states), targets, reduction="none", label_smoothing=0.3)
    torch.testing.assert_close(-0.7 * result - 0.3 * mean, expected)
    gradient = torch.autograd.grad((-0.7 * result - 0.3 * mean).sum(), states)[0]
    torch.testing.assert_close(gradient, torch.autograd.grad(expected.sum(), states)[0])


def test_bfloat16_is_near(lm: LanguageModel) -> None:
    states, targets = states_and_targets(lm, 1.0)
    exact = functional.cross_entropy(lm.logits(states), targets, reduction="none", label_smoothing=0.5).detach()
    lm.model.bfloat16()
    result, mean = token_and_mean_log_probabilities(lm, states.detach().bfloat16(), targets)
    torch.testing.assert_close(-0.5 * result - 0.5 * mean, exact, atol=0.05, rtol=0.01)


@pytest.mark.parametrize("capped", [False, True])
def test_no_supervised_token(lm: LanguageModel, capped: bool) -> None:
    if capped:
        lm.model.config.final_logit_softcapping = 5.0
    states = torch.randn(0, lm.model.config.hidden_size, requires_grad=True)
    result, mean = token_and_mean_log_probabilities(lm, states, torch.zeros(0, dtype=torch.long))
    assert result.shape == mean.shape == (0,)
