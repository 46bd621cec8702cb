"""Log-probabilities a part of the vocabulary at a time, against log_softmax over all of it."""

from pathlib import Path
from typing import Any

import pytest
import torch

from posttrain.models import head
from posttrain.models.head import token_and_mean_log_probabilities, token_log_probabilities
from posttrain.models.language_model import LanguageModel, load_language_model
from posttrain.models.task import TaskConfig


@pytest.fixture
def lm(tiny_model: Path) -> LanguageModel:
    return load_language_model(tiny_model, TaskConfig(), "float32")


def full_log_probabilities(lm: LanguageModel, states: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return lm.logits(states).double().log_softmax(-1).gather(-1, targets[:, None])[:, 0]


@pytest.mark.parametrize("chunk", [7, 64, 100_000])
@pytest.mark.parametrize(("scale", "compiled"), [(1.0, False), (80.0, False), (80.0, True)])
def test_values_and_gradients_match_log_softmax(
    lm: LanguageModel, monkeypatch: pytest.MonkeyPatch, chunk: int, scale: float, compiled: bool
) -> None:
    monkeypatch.setattr(head, "_VOCABULARY_CHUNK", chunk)
    # What would be compiled; test_equivalence_class compiles it.
    monkeypatch.setattr(head, "_compiled", lambda function: function)
    lm.compiled = compiled
    size = lm.model.config.vocab_size
    weight = lm.model.get_output_embeddings().weight
    targets = torch.tensor([0, 1, size - 1, 5, 5, 100])
    weights = torch.tensor([1.0, -2.0, 0.5, 0.0, 3.0, 1.0])
    results: list[tuple[torch.Tensor, ...]] = []
    for function in (token_log_probabilities, full_log_probabilities):
        states = (torch.randn(6, weight.shape[1], generator=torch.Generator().manual_seed(0)) * scale).requires_grad_()
        result = function(lm, states, targets)
        (result * weights).sum().backward()
        results.append((result.detach().float(), states.grad.float(), weight.grad.clone()))
        weight.grad = None
    for actual, expected in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("rows", [1, 5000, 16384, 10**6])
def test_an_accelerator_gets_parts_of_an_aligned_width(rows: int) -> None:
    width = head.vocabulary_chunk(rows, "cuda")
    assert width % 1024 == 0
    assert 1024 * rows <= width * rows <= max(2**27, 2048 * rows)


def chunked_smoothed(lm: LanguageModel, states: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    result, mean = token_and_mean_log_probabilities(lm, states, targets)
    return 0.9 * result + 0.1 * mean


def full_smoothed(lm: LanguageModel, states: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    logits = lm.model.get_output_embeddings()(states)
    logits = logits if logits.dtype == torch.float64 else logits.float()
    return -torch.nn.functional.cross_entropy(logits, targets, reduction="none", label_smoothing=0.1)


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "functions", [(token_log_probabilities, full_log_probabilities), (chunked_smoothed, full_smoothed)]
)
def test_under_autocast_the_error_is_no_larger_than_torchs(
    lm: LanguageModel, monkeypatch: pytest.MonkeyPatch, functions: Any, dtype: torch.dtype, inside: bool
) -> None:
    """Against float64, whether gradients are computed inside of autocast or, as in training, outside."""
    monkeypatch.setattr(head, "_VOCABULARY_CHUNK", 64)
    weight = lm.model.get_output_embeddings().weight
    generator = torch.Generator().manual_seed(0)
    torch.nn.init.normal_(weight, std=0.5, generator=generator)
    random_states = 3 * torch.randn(40, weight.shape[1], generator=generator)
    targets = torch.randint(0, len(weight), (40,), generator=generator)
    chunked, reference = functions

    def gradients(function: Any, on: bool = True) -> list[torch.Tensor]:
        states = random_states.to(weight.dtype, copy=True).requires_grad_()
        weight.grad = None
        with torch.autocast("cpu", dtype, enabled=on):
            loss = function(lm, states, targets).sum()
            if inside:
                loss.backward()
        if not inside:
            loss.backward()
        assert states.grad.dtype == weight.grad.dtype == weight.dtype
        return [states.grad, weight.grad, weight.grad.sum(0)]  # the last is 0 where a row's logits' gradients are

    actual, torchs = gradients(chunked), gradients(reference)
    lm.model.double()
    exact = gradients(reference, on=False)
    for gradient, torch_gradient, exact_gradient in zip(actual, torchs, exact, strict=True):
        assert (gradient - exact_gradient).norm() <= 1.1 * (torch_gradient - exact_gradient).norm()
    assert exact[2].norm() < 1e-5 * exact[1].norm()


@pytest.mark.parametrize(("name", "value"), [("final_logit_softcapping", 5.0), ("logits_scaling", 4.0)])
def test_heads_that_cap_or_scale_their_logits(lm: LanguageModel, name: str, value: float, monkeypatch: Any) -> None:
    setattr(lm.model.config, name, value)
    monkeypatch.setattr(head, "_ROW_CHUNK", 4)
    states = torch.randn(6, lm.model.config.hidden_size, requires_grad=True)
    targets = torch.arange(6)
    result = token_log_probabilities(lm, states, targets)
    torch.testing.assert_close(result, full_log_probabilities(lm, states, targets).float())
    result.sum().backward()
    assert states.grad is not None
    assert states.grad.abs().sum() > 0


def test_no_supervised_token(lm: LanguageModel) -> None:
    states = torch.randn(0, lm.model.config.hidden_size, requires_grad=True)
    result = token_log_probabilities(lm, states, torch.zeros(0, dtype=torch.long))
    assert result.shape == (0,)
    result.sum().backward()
