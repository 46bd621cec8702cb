"""Adversarial training against the same written out with plain PyTorch."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as functional
from torch import Tensor

from posttrain.models.chat import TokenizedExample
from posttrain.models.language_model import LanguageModel
from posttrain.models.packing import Packed, Unit, pack, packed_attention
from posttrain.train.config import LoraConfig
from posttrain.train.lora import add_adapter
from posttrain.train.objectives.loss import Loss, sequence_log_probs
from posttrain.train.objectives.sft import sft
from posttrain.train.regularization.adversarial import backward_adversarial
from posttrain.train.regularization.config import AdversarialConfig

Fresh = Callable[..., LanguageModel]
FGM = AdversarialConfig(method="fgm", epsilon=0.2, weight=0.7)
PGD = AdversarialConfig(method="pgd", epsilon=0.2, step_size=0.09, steps=4, weight=0.7)
# No two begin alike: nothing is shared.
UNITS: list[Unit] = [
    [TokenizedExample([first + place for place in range(length)], [False] * 4 + [True] * (length - 4))]
    for first, length in ((10, 9), (40, 17), (90, 12))
]


def gradients(lm: LanguageModel) -> dict[str, Tensor]:
    result = {name: weight.grad.clone() for name, weight in lm.model.named_parameters() if weight.grad is not None}
    lm.model.zero_grad()
    return result


def forward(lm: LanguageModel, packed: Packed) -> Callable[[], Loss]:
    return lambda: sft(sequence_log_probs(lm, packed))


def by_hand(lm: LanguageModel, example: TokenizedExample, config: AdversarialConfig) -> tuple[Tensor, Tensor]:
    """Sums of the plain and of the perturbed loss of one sequence, with their graphs."""
    ids = torch.tensor(example.ids)
    embedded = lm.model.get_input_embeddings()(ids[None, :-1])

    def loss(added: Tensor) -> Tensor:
        logits = lm.model(inputs_embeds=embedded + added).logits[0]
        targets = ids[1:].where(torch.tensor(example.supervised[1:]), -100)
        return functional.cross_entropy(logits, targets, ignore_index=-100, reduction="sum")

    size = embedded.detach().norm()
    step = config.step_size if config.method == "pgd" else config.epsilon
    added = torch.zeros_like(embedded)
    for _ in range(config.steps if config.method == "pgd" else 1):
        added.requires_grad_()
        (gradient,) = torch.autograd.grad(loss(added), added, retain_graph=True)
        added = (added + step * size * gradient / gradient.norm()).detach()
        added = added * min(1.0, float(config.epsilon * size / added.norm()))
    return loss(torch.zeros_like(embedded)), loss(added)


@pytest.mark.parametrize("config", [FGM, PGD], ids=["fgm", "pgd"])
@pytest.mark.parametrize("padded", [False, True])
def test_gradients_are_those_written_out(fresh: Fresh, config: AdversarialConfig, padded: bool) -> None:
    lm = fresh()
    plain, worst = (sum(losses) for losses in zip(*(by_hand(lm, unit[0], config) for unit in UNITS), strict=True))
    ((plain + config.weight * worst) / 5).backward()
    plain, worst = plain.detach(), worst.detach()
    expected = gradients(lm)
    with packed_attention(lm, 64) as packs:
        assert packs
        if padded:
            lm.model.set_attn_implementation("sdpa")
        actual = backward_adversarial(forward(lm, pack(UNITS, padded=padded)), 5, lm, config)
    assert float(actual.sum) == pytest.approx(float(plain), rel=1e-5)
    value, count = actual.metrics["adversarial"]
    assert (float(value), count) == (pytest.approx(float(worst), rel=1e-4), actual.count)
    assert value > 1.02 * actual.sum, "it is a worse neighbour"
    for name, gradient in gradients(lm).items():
        torch.testing.assert_close(gradient, expected[name], atol=3e-5, rtol=2e-3, msg=name)


def test_one_step_as_long_as_allowed_is_fgm(fresh: Fresh) -> None:
    lm = fresh()
    item = AdversarialConfig(method="pgd", epsilon=0.2, step_size=0.2, steps=1, weight=0.7)
    with packed_attention(lm, 64):
        results = [(backward_adversarial(forward(lm, pack(UNITS)), 5, lm, way), gradients(lm)) for way in (FGM, item)]
    (first, of_first), (second, of_second) = results
    assert first.metrics["adversarial"][0] == second.metrics["adversarial"][0]
    assert all(torch.equal(of_first[name], of_second[name]) for name in of_first)


def test_more_steps_climb_higher(fresh: Fresh) -> None:
    lm = fresh()
    result = {}
    with packed_attention(lm, 64):
        for steps in (1, 2, 8):
            config = AdversarialConfig(method="pgd", epsilon=0.4, step_size=0.1, steps=steps)
            result[steps] = float(
                backward_adversarial(forward(lm, pack(UNITS)), 5, lm, config).metrics["adversarial"][0]
            )
    assert result[1] < result[2] < result[8]


@pytest.mark.parametrize("fails_in", [1, 2, 3])
def test_the_embeddings_are_as_they_were_whatever_happens(fresh: Fresh, fails_in: int) -> None:
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
        plain = forward(lm, pack(UNITS))().sum.detach()
        with pytest.raises(MemoryError):
            backward_adversarial(loss, 5, lm, PGD)
        assert torch.equal(forward(lm, pack(UNITS))().sum.detach(), plain), "nothing is added any more"
    assert calls == fails_in
    assert torch.equal(lm.model.get_input_embeddings().weight, before)
    assert not lm.model.get_input_embeddings()._forward_hooks


def test_all_passes_draw_the_same_random_numbers(fresh: Fresh) -> None:
    lm = fresh()
    drawn = []

    def loss() -> Loss:
        drawn.append(float(torch.rand(())))
        return forward(lm, pack(UNITS))()

    torch.manual_seed(5)
    once = float(torch.rand(()))
    then = float(torch.rand(()))
    torch.manual_seed(5)
    with packed_attention(lm, 64):
        backward_adversarial(loss, 5, lm, PGD)
    assert drawn == [once] * 5
    assert float(torch.rand(())) == then, "as if there had been one pass"


@pytest.mark.parametrize("value", [0.0, float("nan"), float("inf")])
def test_where_there_is_no_way_up(fresh: Fresh, value: float) -> None:
    """A gradient that is nothing, or was lost, leads to no perturbation, and to no NaN in what has none."""
    lm = fresh()

    def loss() -> Loss:
        result = forward(lm, pack(UNITS))()
        return Loss(result.sum.detach() + (result.sum - result.sum.detach()) * value, result.count)

    with packed_attention(lm, 64):
        result = backward_adversarial(loss, 5, lm, FGM)
    if value == 0:
        torch.testing.assert_close(result.metrics["adversarial"][0], result.sum)
        assert all(bool((gradient == 0).all()) for gradient in gradients(lm).values())


def test_with_frozen_embeddings(fresh: Fresh) -> None:
    torch.manual_seed(0)
    lm = add_adapter(fresh(), LoraConfig(rank=4))
    lm.model.train()
    with packed_attention(lm, 64):
        result = backward_adversarial(forward(lm, pack(UNITS)), 5, lm, FGM)
    assert result.metrics["adversarial"][0] > 1.02 * result.sum
    assert {name for name in gradients(lm) if "lora_" not in name} == set()
