"""Adversarial training against plain PyTorch."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as functional
from torch import Tensor

from posttrain.models.chat import TokenizedExample
from posttrain.models.language_model import LanguageModel
from posttrain.models.packing import Packed, Unit, pack, packed_attention
from posttrain.train.data.loader import Batch, BatchLengths
from posttrain.train.lora import add_adapter
from posttrain.train.lora_config import LoraConfig
from posttrain.train.objectives.loss import Loss, sequence_log_probs
from posttrain.train.objectives.sft import sft
from posttrain.train.regularization.adversarial import AdversarialTraining
from posttrain.train.regularization.config import AdversarialConfig

Fresh = Callable[..., LanguageModel]
FGM = AdversarialConfig(method="fgm", epsilon=0.2)
PGD = AdversarialConfig(method="pgd", epsilon=0.2, steps=4)
# All prefixes differ, so nothing is shared.
UNITS: list[Unit] = [
    [TokenizedExample([first + position for position in range(length)], [False] * 4 + [True] * (length - 4))]
    for first, length in ((10, 9), (40, 17), (90, 12))
]


def gradients(lm: LanguageModel) -> dict[str, Tensor]:
    result = {name: weight.grad.clone() for name, weight in lm.model.named_parameters() if weight.grad is not None}
    lm.model.zero_grad()
    return result


def forward(lm: LanguageModel, packed: Packed) -> Callable[[], Loss]:
    return lambda: sft(sequence_log_probs(lm, packed))


def backward_adversarial(loss: Callable[[], Loss], whole: float, lm: LanguageModel, config: AdversarialConfig) -> Loss:
    """Runs the backward pass of one micro-batch."""

    def run(divisor: float, **options: Any) -> Loss:
        result = loss()
        (result.sum / divisor).backward(**options)
        return replace(result, sum=result.sum.detach())

    batch = Batch(0, 0, [[0]], [], BatchLengths([], 0, 0), [0], [0])
    return AdversarialTraining(lm, config).backward(batch, 0, run, whole)


def plain_and_perturbed_loss(
    lm: LanguageModel, example: TokenizedExample, config: AdversarialConfig
) -> tuple[Tensor, Tensor]:
    """Sums of the plain and of the perturbed loss of one sequence, with their graphs."""
    ids = torch.tensor(example.ids)
    embeddings = lm.model.get_input_embeddings()(ids[None, :-1])

    def loss(perturbation: Tensor) -> Tensor:
        logits = lm.model(inputs_embeds=embeddings + perturbation).logits[0]
        targets = ids[1:].where(torch.tensor(example.supervised[1:]), -100)
        return functional.cross_entropy(logits, targets, ignore_index=-100, reduction="sum")

    size = embeddings.detach().norm()
    step = config.epsilon / 2 if config.method == "pgd" else config.epsilon
    perturbation = torch.zeros_like(embeddings)
    for _ in range(config.steps if config.method == "pgd" else 1):
        perturbation.requires_grad_()
        (gradient,) = torch.autograd.grad(loss(perturbation), perturbation, retain_graph=True)
        perturbation = (perturbation + step * size * gradient / gradient.norm()).detach()
        perturbation = perturbation * min(1.0, float(config.epsilon * size / perturbation.norm()))
    return loss(torch.zeros_like(embeddings)), loss(perturbation)


@pytest.mark.parametrize("config", [FGM, PGD], ids=["fgm", "pgd"])
@pytest.mark.parametrize("padded", [False, True])
def test_gradients_match_plain_pytorch(fresh: Fresh, config: AdversarialConfig, padded: bool) -> None:
    lm = fresh()
    plain_sum, perturbed_sum = (
        sum(losses) for losses in zip(*(plain_and_perturbed_loss(lm, unit[0], config) for unit in UNITS), strict=True)
    )
    ((plain_sum + perturbed_sum) / 5).backward()
    plain_sum, perturbed_sum = plain_sum.detach(), perturbed_sum.detach()
    expected = gradients(lm)
    with packed_attention(lm, 64) as packs:
        assert packs
        if padded:
            lm.model.set_attn_implementation("sdpa")
        actual = backward_adversarial(forward(lm, pack(UNITS, padded=padded)), 5, lm, config)
    assert float(actual.sum) == pytest.approx(float(plain_sum), rel=1e-5)
    value, count = actual.metrics["adversarial"]
    assert (float(value), count) == (pytest.approx(float(perturbed_sum), rel=1e-4), actual.count)
    assert value > 1.02 * actual.sum, "the perturbed loss is higher"
    for name, gradient in gradients(lm).items():
        torch.testing.assert_close(gradient, expected[name], atol=3e-5, rtol=2e-3, msg=name)


def test_one_pgd_step_is_fgm_of_half_epsilon(fresh: Fresh) -> None:
    lm = fresh()
    one_step_pgd = AdversarialConfig(method="pgd", epsilon=2 * FGM.epsilon, steps=1)
    with packed_attention(lm, 64):
        results = [
            (backward_adversarial(forward(lm, pack(UNITS)), 5, lm, config), gradients(lm))
            for config in (FGM, one_step_pgd)
        ]
    (fgm_loss, fgm_gradients), (pgd_loss, pgd_gradients) = results
    assert fgm_loss.metrics["adversarial"][0] == pgd_loss.metrics["adversarial"][0]
    # FGM's step ends on the sphere, so that putting it back into the ball may round it.
    for name, gradient in fgm_gradients.items():
        torch.testing.assert_close(pgd_gradients[name], gradient, atol=1e-6, rtol=1e-5, msg=name)


def test_more_pgd_steps_raise_the_perturbed_loss(fresh: Fresh) -> None:
    lm = fresh()
    result = {}
    with packed_attention(lm, 64):
        for steps in (1, 2, 8):
            config = AdversarialConfig(method="pgd", epsilon=0.4, steps=steps)
            result[steps] = float(
                backward_adversarial(forward(lm, pack(UNITS)), 5, lm, config).metrics["adversarial"][0]
            )
    assert result[1] < result[2] < result[8]


@pytest.mark.parametrize("fails_in", [1, 2, 3])
def test_the_embeddings_are_restored_after_an_error(fresh: Fresh, fails_in: int) -> None:
    lm = fresh()
    before = lm.model.get_input_embeddings().weight.detach().clone()
    calls = 0

    def loss() -> Loss:
        nonlocal calls
        calls += 1
        result = forward(lm, pack(UNITS))()
        if calls == fails_in:
            raise MemoryError
        return result

    with packed_attention(lm, 64):
        expected = forward(lm, pack(UNITS))().sum.detach()
        with pytest.raises(MemoryError):
            backward_adversarial(loss, 5, lm, PGD)
        assert torch.equal(forward(lm, pack(UNITS))().sum.detach(), expected), "the perturbation is removed"
    assert calls == fails_in
    assert torch.equal(lm.model.get_input_embeddings().weight, before)
    assert not lm.model.get_input_embeddings()._forward_hooks


def test_all_passes_draw_the_same_random_numbers(fresh: Fresh) -> None:
    lm = fresh()
    draws = []

    def loss() -> Loss:
        draws.append(float(torch.rand(())))
        return forward(lm, pack(UNITS))()

    torch.manual_seed(5)
    first_draw = float(torch.rand(()))
    second_draw = float(torch.rand(()))
    torch.manual_seed(5)
    with packed_attention(lm, 64):
        backward_adversarial(loss, 5, lm, PGD)
    assert draws == [first_draw] * 5
    assert float(torch.rand(())) == second_draw, "as if there had been one pass"


@pytest.mark.parametrize("value", [0.0, float("nan"), float("inf")])
def test_a_zero_or_non_finite_gradient_gives_no_perturbation(fresh: Fresh, value: float) -> None:
    lm = fresh()

    def loss() -> Loss:
        result = forward(lm, pack(UNITS))()
        result.sum.register_hook(lambda gradient: gradient * value)
        return result

    with packed_attention(lm, 64):
        result = backward_adversarial(loss, 5, lm, FGM)
    torch.testing.assert_close(result.metrics["adversarial"][0], result.sum)
    if value == 0:
        assert all(bool((gradient == 0).all()) for gradient in gradients(lm).values())


def test_adversarial_training_with_frozen_embeddings(fresh: Fresh) -> None:
    torch.manual_seed(0)
    lm = add_adapter(fresh(), LoraConfig(rank=4))
    lm.model.train()
    with packed_attention(lm, 64):
        result = backward_adversarial(forward(lm, pack(UNITS)), 5, lm, FGM)
    assert result.metrics["adversarial"][0] > 1.02 * result.sum
    assert {name for name in gradients(lm) if "lora_" not in name} == set()
