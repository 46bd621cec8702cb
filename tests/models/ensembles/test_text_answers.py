"""Texts of several models: votes, re-scored candidates, and pooled next tokens against a loop without a cache."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from label_models import turns

from posttrain.models.ensembles import text_answers
from posttrain.models.ensembles.members import Member
from posttrain.models.ensembles.text_answers import generate_pooled, rescore, vote
from posttrain.models.generate import Generation, generate
from posttrain.models.language_model import LanguageModel, load_language_model
from posttrain.models.likelihood import answer_log_likelihoods
from posttrain.models.task import TaskConfig
from posttrain.models.tiny import write_tiny_model
from posttrain.store.errors import UserError

PROMPTS = [[{"role": "user", "content": text}] for text in ("blue sky", "a red house by the sea", "why?")]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[LanguageModel]:
    """Two tiny models with one tokenizer; their weights are large, so that they are sure of different things."""
    loaded = []
    for seed in (0, 1):
        folder = write_tiny_model(tmp_path_factory.mktemp("tiny") / str(seed), seed=seed)
        lm = load_language_model(folder, TaskConfig(max_new_tokens=6), dtype="float32")
        with torch.no_grad():
            for weight in lm.model.parameters():
                weight.mul_(3.0 if weight.ndim > 1 else 1.0)
        loaded.append(lm)
    return loaded


def members(models: Sequence[LanguageModel]) -> list[Member]:
    return [Member.of(f"m{number}", model) for number, model in enumerate(models)]


def greedy(method: str, models: Sequence[LanguageModel], weights: Sequence[float], prompt: Any) -> list[int]:
    """The reference: one prompt, the whole row anew for each token, float64."""
    tokens: list[int] = []
    for _ in range(6):
        pooled: Any = 0.0
        for model, weight in zip(models, weights, strict=True):
            ids = torch.tensor([[*model.prompt_ids(prompt), *tokens]])
            with torch.no_grad():
                logits = model.model(input_ids=ids).logits[0, -1].double().numpy()
            p = np.exp(logits - logits.max()) / np.exp(logits - logits.max()).sum()
            pooled = pooled + weight * (p if method == "probability" else np.log(p))
        tokens.append(int(np.argmax(pooled)))
        if tokens[-1] in models[0].chat.stop_ids:
            break
    return tokens


@pytest.mark.parametrize("method", ["probability", "logit"])
def test_pooled_tokens_are_those_of_the_formula(models: list[LanguageModel], method: str) -> None:
    weights = [0.3, 0.7]
    answers = generate_pooled(method, members(models), weights, PROMPTS)  # type: ignore[arg-type]
    for answer, prompt in zip(answers, PROMPTS, strict=True):
        tokens = greedy(method, models, weights, prompt)
        stopped = tokens[-1] in models[0].chat.stop_ids
        text = models[0].tokenizer.decode(tokens[: -1 if stopped else None], skip_special_tokens=True)
        assert answer == Generation(text.strip(), stopped)


@pytest.mark.parametrize("method", ["probability", "logit"])
@pytest.mark.parametrize("copies", [1, 2])
def test_one_model_or_equal_ones_write_what_that_model_writes(
    models: list[LanguageModel], method: str, copies: int
) -> None:
    together = generate_pooled(method, members(models[:1] * copies), [1 / copies] * copies, PROMPTS)  # type: ignore[arg-type]
    assert together == generate(models[0], PROMPTS)


def test_different_tokenizers_cannot_be_pooled(models: list[LanguageModel], monkeypatch: pytest.MonkeyPatch) -> None:
    class Other:
        tokenizer = type("Tokenizer", (), {"get_vocab": lambda self: {"a": 0}})()
        task = models[0].task

    other: Any = Other()
    with pytest.raises(UserError, match=r"`m0` and `m1` have different tokenizers.*use method `rescore`"):
        generate_pooled("logit", members([models[0], other]), [0.5, 0.5], PROMPTS)


def test_rescoring_takes_the_best_weighted_sum_per_byte(models: list[LanguageModel]) -> None:
    weights = [0.4, 0.6]
    proposed = [generate(model, PROMPTS) for model in models]
    answers = rescore(members(models), weights, PROMPTS)
    chosen_of = set()
    for row, prompt in enumerate(PROMPTS):
        scores = {}
        for number, own in enumerate(proposed):
            text = own[row].text
            parts = [answer_log_likelihoods(model, [prompt], [text])[0][0] for model in models]
            total = sum(weight * part for weight, part in zip(weights, parts, strict=True))
            scores[number] = total / (len(text.encode()) + 1)
        best = max(scores, key=lambda number: scores[number])
        chosen_of.add(best)
        assert answers[row].text == proposed[best][row].text
    assert len({own[0].text for own in proposed}) == 2


def test_the_order_of_the_models_does_not_matter_to_rescoring(models: list[LanguageModel]) -> None:
    first = rescore(members(models), [0.4, 0.6], PROMPTS)
    assert rescore(members(models[::-1]), [0.6, 0.4], PROMPTS) == first


def test_one_model_rescores_to_its_own_answers(models: list[LanguageModel]) -> None:
    assert rescore(members(models[:1]), [1.0], PROMPTS) == generate(models[0], PROMPTS)


class Written:
    """Answers of models by name, in place of generated ones."""

    def __init__(self, patch: pytest.MonkeyPatch, **texts: list[str]) -> None:
        patch.setattr(Member, "language_model", lambda member, use: texts[member.name])
        patch.setattr(text_answers, "generate", lambda own, prompts: [Generation(text, True) for text in own])
        self.members = [Member(name, lambda: pytest.fail("no model is loaded")) for name in texts]

    def vote(self, weights: list[float]) -> list[str]:
        return [answer.text for answer in vote(self.members, weights, turns(2))]


def test_a_vote_compares_normalised_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    written = Written(monkeypatch, a=["x", "one two"], b=["y  z", "three"], c=["y z", "one  two"])
    assert written.vote([1, 1, 1]) == ["y  z", "one two"]


def test_votes_are_weighted_and_the_first_model_wins_a_tie(monkeypatch: pytest.MonkeyPatch) -> None:
    written = Written(monkeypatch, a=["x", "x"], b=["y", "y"], c=["z", "y"])
    assert written.vote([0.3, 0.1, 0.2]) == ["x", "x"]  # 0.3 against 0.1 + 0.2: a tie, whatever floats say
    assert written.vote([0.1, 0.3, 0.2]) == ["y", "y"]


def test_a_linear_head_writes_no_text() -> None:
    from posttrain.models.ensembles.members import HeadModel

    head = object.__new__(HeadModel)
    with pytest.raises(UserError, match="`linear` is a linear head, which cannot write a text"):
        vote([Member.of("linear", head)], [1.0], PROMPTS)


def test_an_ensemble_is_loaded_from_folders(tmp_path: Path) -> None:
    """One model at a time is in memory where models answer one after the other."""
    loads = []

    def load() -> LanguageModel:
        loads.append(1)
        return load_language_model(write_tiny_model(tmp_path / "m"), TaskConfig(max_new_tokens=2), dtype="float32")

    vote([Member("tiny", load)], [1.0], PROMPTS)
    assert loads == [1]
