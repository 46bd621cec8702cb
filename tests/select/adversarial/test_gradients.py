"""Gains against finite differences and brute force."""

from collections.abc import Callable

import numpy as np
import pytest
import torch

from posttrain.models.language_model import LanguageModel
from posttrain.select.adversarial.attacks import nearest_tokens, perturb
from posttrain.select.adversarial.problem import AnswerLoss, AttackProblem, first_order_gains
from posttrain.select.adversarial.rewriting import Vocabulary

CHOICES = [["card", "cash", "loan", "rate"], ["cash", "card"], ["a longer answer"]]


def embed(lm: LanguageModel, ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        result: torch.Tensor = lm.model.get_input_embeddings()(torch.tensor([ids]))
    return result


@pytest.mark.parametrize("choices", CHOICES)
def test_the_loss_of_the_search_equals_the_loss_of_serving(
    labeller: LanguageModel, problem: Callable[..., AttackProblem], choices: list[str]
) -> None:
    objective = AnswerLoss(labeller, choices)
    passage = problem().passage
    prompts = [passage.prompt(text) for text in ("my card is late", "no", "what is the rate of a loan")]
    for prompt, expected in zip(prompts, objective.losses(prompts), strict=True):
        loss, gradient = objective.gradient(labeller.prompt_ids(prompt))
        assert loss == pytest.approx(expected, rel=1e-4, abs=1e-5)
        assert gradient.shape == (len(labeller.prompt_ids(prompt)), 96)


@pytest.mark.slow
@pytest.mark.parametrize("choices", CHOICES)
def test_gains_are_the_slopes_towards_every_token(
    labeller: LanguageModel, problem: Callable[..., AttackProblem], choices: list[str]
) -> None:
    objective = AnswerLoss(labeller, choices)
    attack = problem("my card", objective=objective)
    gains = attack.gains(attack.start)
    assert gains is not None
    passage, vocabulary = attack.passage, attack.vocabulary
    before = embed(labeller, [*passage.before, *passage.own, *passage.after])
    position = len(passage.before)
    allowed = torch.isfinite(gains[0]).nonzero()[:, 0].tolist()
    assert len(allowed) == 61  # letters and digits but the letter itself
    slopes, step = [], 0.02
    with torch.no_grad():
        for token in allowed:
            direction = vocabulary.embeddings[token] - vocabulary.embeddings[passage.own[0]]
            forward, backward = before.clone(), before.clone()
            forward[0, position] += step * direction
            backward[0, position] -= step * direction
            slopes.append(float(objective.of_embedded(forward) - objective.of_embedded(backward)) / (2 * step))
    result = gains[0, allowed].numpy()
    np.testing.assert_allclose(result, slopes, rtol=0.02, atol=5e-3 * np.abs(slopes).max())
    assert np.argmax(result) == np.argmax(slopes)


def test_gains_of_a_linear_loss_are_exact() -> None:
    generator = torch.Generator().manual_seed(0)
    embeddings = torch.randn(9, 4, generator=generator)
    gradient, own = torch.randn(3, 4, generator=generator), torch.tensor([2, 5, 5])
    vocabulary = Vocabulary(embeddings, torch.ones(9, dtype=torch.bool), torch.zeros(9, dtype=torch.int64))
    gains = first_order_gains(gradient, own, vocabulary)
    points = embeddings[own]
    for position in range(3):
        for token in range(9):
            swapped = points.clone()
            swapped[position] = embeddings[token]
            exact = float((gradient * swapped).sum() - (gradient * points).sum())
            assert float(gains[position, token]) == (
                pytest.approx(exact, abs=1e-5) if token != own[position] else -float("inf")
            )


@pytest.mark.parametrize("choices", CHOICES)
def test_a_short_step_along_the_sign_raises_the_loss(
    labeller: LanguageModel, problem: Callable[..., AttackProblem], choices: list[str]
) -> None:
    objective = AnswerLoss(labeller, choices)
    passage = problem().passage
    ids = [*passage.before, *passage.own, *passage.after]
    loss, gradient = objective.gradient(ids)
    before = embed(labeller, ids)
    for step in (1e-5, 1e-4):
        after = perturb(before[0], gradient, step)[None]
        with torch.no_grad():
            rise = float(objective.of_embedded(after)) - loss
        # To first order the rise is the step times the gradient's 1-norm.
        assert rise == pytest.approx(step * float(gradient.abs().sum()), rel=0.1)
        assert rise > 0


def test_the_nearest_token_has_the_smallest_distance() -> None:
    generator = torch.Generator().manual_seed(1)
    embeddings, points = torch.randn(40, 6, generator=generator), torch.randn(5, 6, generator=generator)
    embeddings[7] = embeddings[3]  # a tie, which the smaller id wins
    points[0] = embeddings[7]
    allowed = torch.rand(5, 40, generator=generator) < 0.5
    allowed[0] = True
    vocabulary = Vocabulary(embeddings, torch.ones(40, dtype=torch.bool), torch.zeros(40, dtype=torch.int64))
    distances = torch.cdist(points, embeddings).masked_fill(~allowed, torch.inf)
    assert nearest_tokens(points, vocabulary, allowed).tolist() == distances.argmin(1).tolist()
    assert nearest_tokens(points, vocabulary, allowed)[0] == 3
