"""Losses of objectives against transformers and the formula, one sequence at a time."""

from typing import Any

import pytest
import torch
import torch.nn.functional as functional

from posttrain.models.chat import TokenizedExample
from posttrain.models.classifier import padding_token
from posttrain.models.language_model import LanguageModel, load_language_model
from posttrain.models.task import TaskConfig
from posttrain.train.objectives.distillation import divergence
from posttrain.train.objectives.kto import mismatched_partners

ALL = [list(range(8))]


@torch.no_grad()
def token_log_probs(lm: LanguageModel, ids: list[int]) -> torch.Tensor:
    """Log-probability of every token but the first."""
    logits = lm.model(input_ids=torch.tensor([ids])).logits[0, :-1].double()
    return logits.log_softmax(-1).gather(1, torch.tensor(ids)[1:, None])[:, 0]


def answer_log_probs(lm: LanguageModel, sequence: TokenizedExample) -> torch.Tensor:
    return token_log_probs(lm, sequence.ids)[torch.tensor(sequence.supervised)[1:]]


def eager_model(prepared: Any) -> LanguageModel:
    """The model with transformers' own attention."""
    prepared.lm.model.set_attn_implementation("eager")
    return prepared.lm


@pytest.mark.parametrize("likelihood", ["text", "completion"])
def test_orpo_matches_its_formula(prepare: Any, likelihood: str) -> None:
    prepared = prepare("orpo", {"beta": 0.3, "likelihood": likelihood})
    loss, _ = prepared.backward(ALL)
    lm, likelihoods, log_odds = eager_model(prepared), [], []
    for chosen, rejected in prepared.objective.answers:
        likelihoods.append(token_log_probs(lm, chosen.ids) if likelihood == "text" else answer_log_probs(lm, chosen))
        chosen_mean, rejected_mean = (answer_log_probs(lm, sequence).mean() for sequence in (chosen, rejected))
        log_odds.append(
            (chosen_mean - torch.log1p(-chosen_mean.exp())) - (rejected_mean - torch.log1p(-rejected_mean.exp()))
        )
    expected = -torch.cat(likelihoods).mean() - 0.3 * functional.logsigmoid(torch.stack(log_odds)).mean()
    assert loss == pytest.approx(expected.item(), rel=1e-5)


def test_cpo_matches_its_formula(prepare: Any) -> None:
    prepared = prepare("cpo")
    loss, _ = prepared.backward(ALL)
    lm = eager_model(prepared)
    pairs = [[answer_log_probs(lm, sequence) for sequence in unit] for unit in prepared.objective.units]
    margins = torch.stack([chosen.sum() - rejected.sum() for chosen, rejected in pairs])
    expected = -functional.logsigmoid(0.1 * margins).mean() - torch.cat([chosen for chosen, _ in pairs]).mean()
    assert loss == pytest.approx(expected.item(), rel=1e-5)


def test_kto_matches_its_formula(prepare: Any, tiny_model: Any) -> None:
    prepared = prepare("kto", {"beta": 0.5, "undesirable_weight": 0.6})
    loss, metrics = prepared.backward(ALL)
    policy, reference = eager_model(prepared), load_language_model(tiny_model, TaskConfig(), "float32")
    units = [sequence for (sequence,) in prepared.objective.units]
    prompts = [sequence.ids[: sequence.supervised.index(True)] for sequence in units]
    answers = [sequence.ids[sequence.supervised.index(True) :] for sequence in units]
    ratio = torch.stack(
        [answer_log_probs(policy, sequence).sum() - answer_log_probs(reference, sequence).sum() for sequence in units]
    )
    mismatched = zip(prompts, answers[-1:] + answers[:-1], strict=True)
    mismatched_units = [TokenizedExample(a + b, [False] * len(a) + [True] * len(b)) for a, b in mismatched]
    kl = (
        torch.stack(
            [
                answer_log_probs(policy, sequence).sum() - answer_log_probs(reference, sequence).sum()
                for sequence in mismatched_units
            ]
        )
        .mean()
        .clamp(min=0)
    )
    desirable = torch.tensor([line % 3 != 0 for line in range(1, 9)])
    values = torch.where(
        desirable, 1 - torch.sigmoid(0.5 * (ratio - kl)), 0.6 * (1 - torch.sigmoid(0.5 * (kl - ratio)))
    )
    assert loss == pytest.approx(values.mean().item(), rel=1e-5)
    assert metrics["kl"] == pytest.approx(kl.item(), rel=1e-4, abs=1e-6)


def test_kto_splits_pairs_into_two_answers(prepare: Any, records_of_shape: Any) -> None:
    prepared = prepare("kto", records=records_of_shape("pair"))
    assert len(prepared.objective.units) == 16
    assert prepared.objective.desirable.tolist() == [True, False] * 8
    prompts = [unit[0].ids[: unit[0].supervised.index(True)] for unit in prepared.objective.units]
    assert all(prompts[row] != prompts[other] for row, other in enumerate(prepared.objective.partner))


def test_partners_answer_other_prompts() -> None:
    assert mismatched_partners([[1], [2], [3], [4], [5]], 3) == [2, 0, 1, 4, 3]
    assert mismatched_partners([[1], [2], [3], [4]], 3) == [3, 0, 1, 2], "nobody is without a partner"
    assert mismatched_partners([[1], [1], [2], [2]], 4) == [2, 3, 0, 1], "a prompt does not meet its own answers"
    assert sorted(mismatched_partners([[1], [1], [1], [2]], 4)) == [0, 1, 2, 3], "each answer is used once"


def test_reward_and_classification_match_transformers(prepare: Any) -> None:
    for objective in ("reward", "classification"):
        prepared = prepare(objective)
        loss, _ = prepared.backward(ALL)
        lm = eager_model(prepared)
        assert padding_token(lm) == lm.tokenizer.pad_token_id
        sequences = [sequence.ids[:-1] for unit in prepared.objective.units for sequence in unit]
        width = max(map(len, sequences))
        padded = torch.tensor([ids + [lm.tokenizer.pad_token_id] * (width - len(ids)) for ids in sequences])
        mask = (padded != lm.tokenizer.pad_token_id).long()
        logits = lm.model(input_ids=padded, attention_mask=mask).logits
        if objective == "reward":
            margins = logits[0::2, 0] - logits[1::2, 0] - torch.arange(1, 9) / 8
            expected = -functional.logsigmoid(margins).mean()
        else:
            expected = functional.cross_entropy(logits, prepared.objective.targets)
        assert loss == pytest.approx(expected.item(), rel=1e-5)


@pytest.mark.parametrize("kind", ["forward", "reverse", "jensen_shannon"])
def test_distillation_matches_its_formula(prepare: Any, other_model: Any, kind: str) -> None:
    prepared = prepare("distill", {"divergence": kind, "temperature": 1.5})
    loss, _ = prepared.backward(ALL)
    student, teacher = eager_model(prepared), load_language_model(other_model, TaskConfig(), "float32")
    result = []
    for (sequence,) in prepared.objective.units:
        supervised = torch.tensor(sequence.supervised)[1:]
        logits_by_model = [
            lm.model(input_ids=torch.tensor([sequence.ids])).logits[0, :-1][supervised] / 1.5
            for lm in (student, teacher)
        ]
        result.append(
            divergence(*(logits.double().log_softmax(-1) for logits in logits_by_model), prepared.objective.settings)
        )
    assert loss == pytest.approx(torch.cat(result).mean().item(), rel=1e-4)


def test_hidden_distillation_matches_its_formula(prepare: Any, other_model: Any) -> None:
    prepared = prepare("distill", {"divergence": "none", "layers": [(1, 2), (-1, -1)]})
    loss, _ = prepared.backward(ALL)
    student, teacher = eager_model(prepared), load_language_model(other_model, TaskConfig(), "float32")
    projections = list(student.model.distillation_projections)
    assert [(p.in_features, p.out_features) for p in projections] == [(96, 128), (96, 128)]
    result = []
    for (sequence,) in prepared.objective.units:
        supervised = torch.tensor(sequence.supervised)[1:]
        ids = torch.tensor([sequence.ids])
        states_by_model = [
            lm.model(input_ids=ids, output_hidden_states=True).hidden_states for lm in (student, teacher)
        ]
        pairs = [(states_by_model[0][1], states_by_model[1][2]), (states_by_model[0][-1], states_by_model[1][-1])]
        result.append(
            sum(
                (projection(student_states[0, :-1][supervised]) - teacher_states[0, :-1][supervised]).square().mean(-1)
                for projection, (student_states, teacher_states) in zip(projections, pairs, strict=True)
            )
        )
    assert loss == pytest.approx(torch.cat(result).mean().item(), rel=1e-4)


@pytest.mark.parametrize("settings", [{}, {"top_k": 7}, {"divergence": "none"}])
def test_self_distillation_of_a_model_has_no_gradient(prepare: Any, tiny_model: Any, settings: dict[str, Any]) -> None:
    prepared = prepare("distill", settings, teacher=tiny_model, moved=False)
    loss, gradients, _ = prepared.gradients(ALL)
    assert abs(loss) < 1e-6
    assert max(float(gradient.abs().max()) for gradient in gradients.values()) < 1e-6
