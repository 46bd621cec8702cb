"""Searches labelled records for adversarial prompts: small rewritings that change the model's answer."""

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from posttrain.models.language_model import LanguageModel
from posttrain.models.likelihood import answer_log_likelihoods, label_scores
from posttrain.models.task import Turns
from posttrain.select.adversarial.attacks import fgsm, gcg
from posttrain.select.adversarial.examples import (
    AdversarialExample,
    Judge,
    LabelledPrompt,
    SearchOutcome,
    SearchSettings,
)
from posttrain.select.adversarial.problem import AnswerLoss, AttackProblem, QueryBudget, Rewriting, TextSimilarity
from posttrain.select.adversarial.rewriting import Vocabulary, find_passage
from posttrain.store.errors import UserError, suggest
from posttrain.store.progress import progress_bar

ATTACKS: Mapping[str, Callable[[AttackProblem], Iterator[list[Rewriting]]]] = {
    "gcg": gcg,
    "fgsm": fgsm,
}
"""Each yields the candidates of one step after the other; those of one step are alternatives."""

_MAX_RIVALS = 3  # labels that the right one is compared with while searching
_JUDGE_BATCH = 16  # records that are answered at a time


@dataclass(frozen=True)
class _Unconfirmed:
    record: LabelledPrompt
    text_before: str
    answer_before: str
    candidate: Rewriting
    prompt: Turns


def check_attack(name: str) -> None:
    """Raises a UserError for an unknown method."""
    if name not in ATTACKS:
        raise UserError(f"no method `{name}`", where="--method", fix=suggest(name, ATTACKS))


def search(
    lm: LanguageModel,
    records: Sequence[LabelledPrompt],
    judge: Judge,
    similarity: TextSimilarity,
    settings: SearchSettings,
) -> SearchOutcome:
    """Rewrites records that the model answers rightly, a few tokens each, until its answer changes.

    Records are tried in an order drawn by the seed, until there are enough examples, all records are tried or the
    budget is spent. Every rewriting is judged in the way that the model is evaluated.

    Args:
        lm: the model.
        records: labelled records with different ids.
        judge: see `Judge`.
        similarity: similarity of texts, see `TextSimilarity`.
        settings: the method, and the bounds of the search.

    Raises:
        UserError: the method is unknown, or the model answers none of the records rightly.
    """
    check_attack(settings.method)
    ordered = sorted(records, key=lambda record: (_draw(settings.seed, record.id), record.id))
    budget, vocabulary = QueryBudget(settings.budget), Vocabulary.from_language_model(lm)
    counts: Counter[str] = Counter()
    fooled: list[_Unconfirmed] = []
    with progress_bar("looking for adversarial prompts", len(ordered), "records") as advance:
        for start in range(0, len(ordered), _JUDGE_BATCH):
            batch = ordered[start : start + _JUDGE_BATCH]
            if len(fooled) >= settings.n or not budget.take(len(batch)):
                break
            judged = judge(batch, [record.prompt for record in batch])
            for record, answer, right in zip(batch, judged.answers, judged.right, strict=True):
                if len(fooled) >= settings.n:
                    break
                advance(1, f"{len(fooled)} found")
                counts["records"] += 1
                if not right:
                    counts["wrong"] += 1
                    continue
                problem = _attack_problem(lm, record, answer, vocabulary, similarity, settings, budget)
                if problem is None:
                    counts["no_words"] += 1
                    continue
                counts["tried"] += 1
                candidate, within_budget = _attack(problem, record, answer, judge, settings.method)
                if candidate is not None:
                    prompt = problem.passage.prompt(candidate.text)
                    fooled.append(_Unconfirmed(record, problem.passage.text, answer, candidate, prompt))
                else:
                    counts["unchanged" if within_budget else "out_of_budget"] += 1
    if counts["records"] and counts["records"] == counts["wrong"]:
        raise UserError(
            f"the champion answers none of {counts['records']} records rightly",
            fix="name other --records, or run the loop first: posttrain run",
        )
    examples = _confirmed(lm, fooled, judge)
    counts["unconfirmed"], counts["kept"] = len(fooled) - len(examples), len(examples)
    names = ("records", "wrong", "no_words", "tried", "unchanged", "out_of_budget", "unconfirmed", "kept")
    return SearchOutcome(examples, {name: counts[name] for name in names}, budget.spent + 2 * len(fooled))


def _attack_problem(
    lm: LanguageModel,
    record: LabelledPrompt,
    answer: str,
    vocabulary: Vocabulary,
    similarity: TextSimilarity,
    settings: SearchSettings,
    budget: QueryBudget,
) -> AttackProblem | None:
    passage = find_passage(lm, record.prompt)
    if passage is None:
        return None
    choices = [answer]
    if labels := lm.task.label_set:
        right = _label(answer, labels)
        ranked = np.argsort(-label_scores(lm, [record.prompt], labels).log_probabilities[0], kind="stable")
        choices = [right, *[labels[row] for row in ranked if labels[row] != right][:_MAX_RIVALS]]
        budget.take(1)
    return AttackProblem(
        lm,
        passage,
        AnswerLoss(lm, choices),
        vocabulary,
        similarity,
        settings.similarity,
        settings.swaps,
        budget,
        np.random.default_rng(list(_draw(settings.seed, record.id))),
    )


def _attack(
    problem: AttackProblem, record: LabelledPrompt, before: str, judge: Judge, method: str
) -> tuple[Rewriting | None, bool]:
    """Returns the most similar candidate of the first step that fools the model, and whether the budget lasted."""
    for candidates in ATTACKS[method](problem):
        if not problem.budget.take(len(candidates)):
            return None, False
        prompts = [problem.passage.prompt(candidate.text) for candidate in candidates]
        judged = judge([record] * len(prompts), prompts)
        examples = [
            candidate
            for candidate, answer, right in zip(candidates, judged.answers, judged.right, strict=True)
            if not right and _differ(answer, before)
        ]
        if examples:
            return max(examples, key=lambda candidate: candidate.similarity), True
    return None, not problem.budget.refused


def _confirmed(lm: LanguageModel, fooled: Sequence[_Unconfirmed], judge: Judge) -> list[AdversarialExample]:
    """Returns the examples that also fool the model when all are judged together."""
    if not fooled:
        return []
    # Judged in another batch: in low precision a close call may go either way, and such an example is worth nothing.
    records, prompts = [example.record for example in fooled], [example.prompt for example in fooled]
    judged = judge(records, prompts)
    rights = [example.answer_before for example in fooled]
    before = _losses(lm, [record.prompt for record in records], rights)
    after = _losses(lm, prompts, rights)
    return [
        AdversarialExample(
            original=example.record.id,
            prompt=example.prompt,
            completion=example.record.completion,
            text_before=example.text_before,
            text=example.candidate.text,
            answer_before=example.answer_before,
            answer=judged.answers[row],
            similarity=example.candidate.similarity,
            swaps=example.candidate.swaps,
            loss_before=before[row],
            loss=after[row],
        )
        for row, example in enumerate(fooled)
        if not judged.right[row] and _differ(judged.answers[row], example.answer_before)
    ]


def _losses(lm: LanguageModel, prompts: Sequence[Turns], answers: Sequence[str]) -> list[float]:
    """Computes -ln P(answer | prompt) in nats, among the labels where there are some."""
    labels = lm.task.label_set
    if not labels:
        return [-value for value in answer_log_likelihoods(lm, prompts, answers)[0].tolist()]
    columns = [labels.index(_label(answer, labels)) for answer in answers]
    scores = label_scores(lm, prompts, labels, tolerance=0).log_probabilities
    return [-float(scores[row, label]) for row, label in enumerate(columns)]


def _label(answer: str, labels: Sequence[str]) -> str:
    """Returns the label as the label set spells it; it was judged right, so it is one of them."""
    return next(label for label in labels if not _differ(label, answer))


def _differ(left: str, right: str) -> bool:
    return left.split() != right.split()


def _draw(seed: int, id: str) -> bytes:
    return hashlib.sha256(f"{seed}:{id}".encode()).digest()
