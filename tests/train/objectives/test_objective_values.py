"""Lessons against what transformers and the formula say, one sequence at a time."""

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
def tokens(lm: LanguageModel, ids: list[int]) -> torch.Tensor:
    """Log-probability of every token but the first."""
    logits = lm.model(input_ids=torch.tensor([ids])).logits[0, :-1].double()
    return logits.log_softmax(-1).gather(1, torch.tensor(ids)[1:, None])[:, 0]


def answer(lm: LanguageModel, sequence: TokenizedExample) -> torch.Tensor:
    return tokens(lm, sequence.ids)[torch.tensor(sequence.supervised)[1:]]


def plain(prepared: Any) -> LanguageModel:
    """The model with transformers' own attention."""
    prepared.lm.model.set_attn_implementation("eager")
    return prepared.lm


@pytest.mark.parametrize("likelihood", ["text", "completion"])
def test_orpo(prepare: Any, likelihood: str) -> None:
    prepared = prepare("orpo", {"orpo": {"beta": 0.3, "likelihood": likelihood}})
    loss, _ = prepared.backward(ALL)
    lm, learned, odds = plain(prepared), [], []
    for chosen, rejected in prepared.objective.answers:
        learned.append(tokens(lm, chosen.ids) if likelihood == "text" else answer(lm, chosen))
        won, lost = (answer(lm, side).mean() for side in (chosen, rejected))
        odds.append((won - torch.log1p(-won.exp())) - (lost - torch.log1p(-lost.exp())))
    expected = -torch.cat(learned).mean() - 0.3 * functional.logsigmoid(torch.stack(odds)).mean()
    assert loss == pytest.approx(expected.item(), rel=1e-5)


def test_cpo(prepare: Any) -> None:
    prepared = prepare("cpo")
    loss, _ = prepared.backward(ALL)
    lm = plain(prepared)
    sides = [[answer(lm, side) for side in unit] for unit in prepared.objective.units]
    apart = torch.stack([won.sum() - lost.sum() for won, lost in sides])
    expected = -functional.logsigmoid(0.1 * apart).mean() - torch.cat([won for won, _ in sides]).mean()
    assert loss == pytest.approx(expected.item(), rel=1e-5)


def test_kto(prepare: Any, tiny_model: Any) -> None:
    prepared = prepare("kto", {"kto": {"beta": 0.5, "undesirable_weight": 0.6}})
    loss, metrics = prepared.backward(ALL)
    policy, reference = plain(prepared), load_language_model(tiny_model, TaskConfig(), "float32")
    units = [sequence for (sequence,) in prepared.objective.units]
    asked = [sequence.ids[: sequence.supervised.index(True)] for sequence in units]
    said = [sequence.ids[sequence.supervised.index(True) :] for sequence in units]
    ratio = torch.stack([answer(policy, entry).sum() - answer(reference, entry).sum() for entry in units])
    met = zip(asked, said[-1:] + said[:-1], strict=True)
    others = [TokenizedExample(a + b, [False] * len(a) + [True] * len(b)) for a, b in met]
    kl = (
        torch.stack([answer(policy, entry).sum() - answer(reference, entry).sum() for entry in others])
        .mean()
        .clamp(min=0)
    )
    good = torch.tensor([line % 3 != 0 for line in range(1, 9)])
    values = torch.where(good, 1 - torch.sigmoid(0.5 * (ratio - kl)), 0.6 * (1 - torch.sigmoid(0.5 * (kl - ratio))))
    assert loss == pytest.approx(values.mean().item(), rel=1e-5)
    assert metrics["kl"] == pytest.approx(kl.item(), rel=1e-4, abs=1e-6)


def test_kto_takes_pairs_as_two_answers(prepare: Any, shaped: Any) -> None:
    prepared = prepare("kto", records=shaped("pair"))
    assert len(prepared.objective.units) == 16
    assert prepared.objective.desirable.tolist() == [True, False] * 8
    prompts = [unit[0].ids[: unit[0].supervised.index(True)] for unit in prepared.objective.units]
    assert all(prompts[row] != prompts[other] for row, other in enumerate(prepared.objective.partner))


def test_partners_answer_other_prompts() -> None:
    assert mismatched_partners([[1], [2], [3], [4], [5]], 3) == [2, 0, 1, 4, 3]
    assert mismatched_partners([[1], [2], [3], [4]], 3) == [3, 0, 1, 2], "nobody is left alone"
    assert mismatched_partners([[1], [1], [2], [2]], 4) == [2, 3, 0, 1], "a prompt does not meet its own answers"
    assert sorted(mismatched_partners([[1], [1], [1], [2]], 4)) == [0, 1, 2, 3], "each answer is given once"


def test_reward_and_classes_are_what_transformers_reads(prepare: Any) -> None:
    for objective in ("reward", "classification"):
        prepared = prepare(objective)
        loss, _ = prepared.backward(ALL)
        lm = plain(prepared)
        assert padding_token(lm) == lm.tokenizer.pad_token_id
        sequences = [sequence.ids[:-1] for unit in prepared.objective.units for sequence in unit]
        width = max(map(len, sequences))
        padded = torch.tensor([ids + [lm.tokenizer.pad_token_id] * (width - len(ids)) for ids in sequences])
        mask = (padded != lm.tokenizer.pad_token_id).long()
        logits = lm.model(input_ids=padded, attention_mask=mask).logits
        if objective == "reward":
            apart = logits[0::2, 0] - logits[1::2, 0] - torch.arange(1, 9) / 8
            expected = -functional.logsigmoid(apart).mean()
        else:
            expected = functional.cross_entropy(logits, prepared.objective.targets)
        assert loss == pytest.approx(expected.item(), rel=1e-5)


@pytest.mark.parametrize("kind", ["forward", "reverse", "jensen_shannon"])
def test_distillation(prepare: Any, other_model: Any, kind: str) -> None:
    prepared = prepare("distill", {"distill": {"divergence": kind, "temperature": 1.5}})
    loss, _ = prepared.backward(ALL)
    student, teacher = plain(prepared), load_language_model(other_model, TaskConfig(), "float32")
    result = []
    for (sequence,) in prepared.objective.units:
        on = torch.tensor(sequence.supervised)[1:]
        both = [lm.model(input_ids=torch.tensor([sequence.ids])).logits[0, :-1][on] / 1.5 for lm in (student, teacher)]
        result.append(divergence(*(logits.double().log_softmax(-1) for logits in both), prepared.objective.settings))
    assert loss == pytest.approx(torch.cat(result).mean().item(), rel=1e-4)


def test_hidden_distillation_with_projections(prepare: Any, other_model: Any) -> None:
    prepared = prepare("distill_hidden", {"distill_hidden": {"layers": [(1, 2), (-1, -1)]}})
    loss, _ = prepared.backward(ALL)
    student, teacher = plain(prepared), load_language_model(other_model, TaskConfig(), "float32")
    projections = list(student.model.distillation_projections)
    assert [(p.in_features, p.out_features) for p in projections] == [(96, 128), (96, 128)]
    result = []
    for (sequence,) in prepared.objective.units:
        on = torch.tensor(sequence.supervised)[1:]
        ids = torch.tensor([sequence.ids])
        both = [lm.model(input_ids=ids, output_hidden_states=True).hidden_states for lm in (student, teacher)]
        pairs = [(both[0][1], both[1][2]), (both[0][-1], both[1][-1])]
        result.append(
            sum(
                (projection(mine[0, :-1][on]) - theirs[0, :-1][on]).square().mean(-1)
                for projection, (mine, theirs) in zip(projections, pairs, strict=True)
            )
        )
    assert loss == pytest.approx(torch.cat(result).mean().item(), rel=1e-4)


@pytest.mark.parametrize("objective", ["distill", "distill_hidden"])
@pytest.mark.parametrize("top_k", [None, 7])
def test_a_model_learns_nothing_of_itself(prepare: Any, tiny_model: Any, objective: str, top_k: int | None) -> None:
    prepared = prepare(objective, {"distill": {"top_k": top_k}}, teacher=tiny_model, moved=False)
    loss, gradients, _ = prepared.gradients(ALL)
    assert abs(loss) < 1e-6
    assert max(float(gradient.abs().max()) for gradient in gradients.values()) < 1e-6
