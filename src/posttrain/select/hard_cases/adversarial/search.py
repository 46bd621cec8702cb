"""Search among labelled records for prompts that fool a model."""

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from posttrain.models.language_model import LanguageModel
from posttrain.models.likelihood import answer_log_likelihoods, label_scores
from posttrain.models.task import Turns
from posttrain.select.hard_cases.adversarial.fgsm import fgsm
from posttrain.select.hard_cases.adversarial.gcg import gcg
from posttrain.select.hard_cases.adversarial.hotflip import hotflip
from posttrain.select.hard_cases.adversarial.objective import Objective
from posttrain.select.hard_cases.adversarial.outcome import Adversarial, Judge, Labelled, Outcome, Settings
from posttrain.select.hard_cases.adversarial.passage import find_passage
from posttrain.select.hard_cases.adversarial.problem import Budget, Candidate, Problem, Similarity
from posttrain.select.hard_cases.adversarial.vocabulary import Vocabulary
from posttrain.store.errors import UserError
from posttrain.store.nearest import did_you_mean
from posttrain.store.progress import task

METHODS: dict[str, Callable[[Problem], Iterator[list[Candidate]]]] = {"gcg": gcg, "hotflip": hotflip, "fgsm": fgsm}
"""Each yields what it comes upon, step by step; the candidates of one step are alternatives."""

_RIVALS = 3  # labels that the right one is told from while searching
_JUDGED = 16  # records that are answered at a time


@dataclass(frozen=True)
class _Fooled:
    record: Labelled
    text_before: str
    answer_before: str
    candidate: Candidate
    prompt: Turns


def check_method(name: str) -> None:
    """Raise a UserError for an unknown method."""
    if name not in METHODS:
        raise UserError(f"no method `{name}`", where="--method", fix=did_you_mean(name, METHODS))


def search(
    lm: LanguageModel, records: Sequence[Labelled], judge: Judge, similarity: Similarity, settings: Settings
) -> Outcome:
    """Rewrite records that the model answers rightly, a few tokens each, until it answers them otherwise.

    Records are tried in an order drawn by the seed, until enough examples are found, all records are tried or the
    budget is spent. Every rewriting is judged as the model is evaluated, and what was found is judged once more, all
    together, in the end.

    Args:
        lm: the model.
        records: labelled, with different ids.
        judge: see `Judge`.
        similarity: of texts, see `Similarity`.
        settings: how far to go.

    Raises:
        UserError: the method is unknown, or the model answers none of the records rightly.
    """
    check_method(settings.method)
    drawn = sorted(records, key=lambda record: (_draw(settings.seed, record.id), record.id))
    budget, vocabulary = Budget(settings.budget), Vocabulary.of(lm)
    counts: Counter[str] = Counter()
    fooled: list[_Fooled] = []
    with task("looking for adversarial prompts", len(drawn), "records") as advance:
        for start in range(0, len(drawn), _JUDGED):
            some = drawn[start : start + _JUDGED]
            if len(fooled) >= settings.n or not budget.take(len(some)):
                break
            judged = judge(some, [record.prompt for record in some])
            for record, answer, right in zip(some, judged.answers, judged.right, strict=True):
                if len(fooled) >= settings.n:
                    break
                advance(1, f"{len(fooled)} found")
                counts["records"] += 1
                if not right:
                    counts["wrong"] += 1
                    continue
                problem = _problem(lm, record, answer, vocabulary, similarity, settings, budget)
                if problem is None:
                    counts["no_words"] += 1
                    continue
                counts["tried"] += 1
                candidate, whole = _attack(problem, record, answer, judge, settings.method)
                if candidate is not None:
                    prompt = problem.passage.prompt(candidate.text)
                    fooled.append(_Fooled(record, problem.passage.text, answer, candidate, prompt))
                else:
                    counts["unchanged" if whole else "out_of_budget"] += 1
    if counts["records"] and counts["records"] == counts["wrong"]:
        raise UserError(
            f"the champion answers none of {counts['records']} records rightly",
            fix="name other --records, or turn the loop first: posttrain run",
        )
    examples = _confirmed(lm, fooled, judge)
    counts["unconfirmed"], counts["kept"] = len(fooled) - len(examples), len(examples)
    names = ("records", "wrong", "no_words", "tried", "unchanged", "out_of_budget", "unconfirmed", "kept")
    return Outcome(examples, {name: counts[name] for name in names}, budget.spent + 2 * len(fooled))


def _problem(
    lm: LanguageModel,
    record: Labelled,
    answer: str,
    vocabulary: Vocabulary,
    similarity: Similarity,
    settings: Settings,
    budget: Budget,
) -> Problem | None:
    passage = find_passage(lm, record.prompt)
    if passage is None:
        return None
    choices = [answer]
    if labels := lm.task.label_set:
        right = _label(answer, labels)
        ranked = np.argsort(-label_scores(lm, [record.prompt], labels).log_probabilities[0], kind="stable")
        choices = [right, *[labels[row] for row in ranked if labels[row] != right][:_RIVALS]]
        budget.take(1)
    return Problem(
        lm,
        passage,
        Objective(lm, choices),
        vocabulary,
        similarity,
        settings.similarity,
        settings.swaps,
        budget,
        np.random.default_rng(list(_draw(settings.seed, record.id))),
    )


def _attack(
    problem: Problem, record: Labelled, before: str, judge: Judge, method: str
) -> tuple[Candidate | None, bool]:
    """The most similar candidate of the first step that fools the model; and whether the budget lasted."""
    for candidates in METHODS[method](problem):
        if not problem.budget.take(len(candidates)):
            return None, False
        prompts = [problem.passage.prompt(one.text) for one in candidates]
        judged = judge([record] * len(prompts), prompts)
        found = [
            one
            for one, answer, right in zip(candidates, judged.answers, judged.right, strict=True)
            if not right and _differ(answer, before)
        ]
        if found:
            return max(found, key=lambda one: one.similarity), True
    return None, not problem.budget.refused


def _confirmed(lm: LanguageModel, fooled: Sequence[_Fooled], judge: Judge) -> list[Adversarial]:
    """What fools the model in another company of prompts too: in low precision a close call may go either way."""
    if not fooled:
        return []
    records, prompts = [one.record for one in fooled], [one.prompt for one in fooled]
    judged = judge(records, prompts)
    rights = [one.answer_before for one in fooled]
    before = _losses(lm, [record.prompt for record in records], rights)
    after = _losses(lm, prompts, rights)
    return [
        Adversarial(
            original=one.record.id,
            prompt=one.prompt,
            completion=one.record.completion,
            text_before=one.text_before,
            text=one.candidate.text,
            answer_before=one.answer_before,
            answer=judged.answers[row],
            similarity=one.candidate.similarity,
            swaps=one.candidate.swaps,
            loss_before=before[row],
            loss=after[row],
        )
        for row, one in enumerate(fooled)
        if not judged.right[row] and _differ(judged.answers[row], one.answer_before)
    ]


def _losses(lm: LanguageModel, prompts: Sequence[Turns], answers: Sequence[str]) -> list[float]:
    """-ln P(answer | prompt) in nats, among the labels where there are some."""
    labels = lm.task.label_set
    if not labels:
        return [-value for value in answer_log_likelihoods(lm, prompts, answers)[0].tolist()]
    place = [labels.index(_label(answer, labels)) for answer in answers]
    scores = label_scores(lm, prompts, labels, tolerance=0).log_probabilities
    return [-float(scores[row, label]) for row, label in enumerate(place)]


def _label(answer: str, labels: Sequence[str]) -> str:
    """The label as the label set spells it; it has passed as right, so it is one of them."""
    return next(label for label in labels if not _differ(label, answer))


def _differ(one: str, other: str) -> bool:
    return one.split() != other.split()


def _draw(seed: int, id: str) -> bytes:
    return hashlib.sha256(f"{seed}:{id}".encode()).digest()
