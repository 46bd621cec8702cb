"""Scorers of answers that are not one text: ratings, several labels, and spans."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from posttrain.evaluate.config import SuiteConfig
from posttrain.evaluate.metrics import ClassMetrics, macro_f1
from posttrain.evaluate.scorers.base import Examples, Scorer, ScorerOutput, from_generations, write_answers
from posttrain.evaluate.scorers.likelihood import LABEL_LIKELIHOOD, score_label_likelihood
from posttrain.models.answer_form import Part
from posttrain.models.task import labelled_text
from posttrain.store.errors import UserError

if TYPE_CHECKING:
    from posttrain.models.ensembles.ensemble import Ensemble
    from posttrain.models.language_model import LanguageModel

Parts = Counter[Part]


def score_rating(lm: LanguageModel | Ensemble, examples: Examples, suite: SuiteConfig, where: str) -> ScorerOutput:
    """Scores ratings as labels, with the mean distance between the most probable rating and the right one."""
    if lm.task.kind != "rating":
        raise _wrong_task("rating", where)
    scored = score_label_likelihood(lm, examples, suite, where)
    errors = [abs(int(got) - int(want)) for got, want in zip(scored.predicted, examples.answers(where), strict=True)]
    return replace(scored, metrics={"mean_absolute_error": float(np.mean(errors))})


RATING = replace(
    LABEL_LIKELIHOOD, score=score_rating, metrics=LABEL_LIKELIHOOD.metrics | {"mean_absolute_error"}, needs_labels=True
)


def score_choices(lm: LanguageModel | Ensemble, examples: Examples, suite: SuiteConfig, where: str) -> ScorerOutput:
    """Scores 1 where exactly the right labels are written, else 0. Invalid: cut off, or with other labels."""
    return _score_parts("choices", lm, examples, where)


def score_spans(lm: LanguageModel | Ensemble, examples: Examples, suite: SuiteConfig, where: str) -> ScorerOutput:
    """Scores the F1 of each record's spans: one is right with the same label and words, as often as it is expected.

    Invalid: cut off, not a list of spans, other labels, or words that are not in the text.
    """
    return _score_parts("spans", lm, examples, where)


def _score_parts(kind: str, lm: LanguageModel | Ensemble, examples: Examples, where: str) -> ScorerOutput:
    form = lm.task.form
    if form is None or form.kind != kind:
        raise _wrong_task(kind, where)
    texts = [labelled_text(prompt, None) for prompt in examples.prompts]
    expected: list[Parts] = []
    for answer, text, location in zip(examples.answers(where), texts, examples.locations, strict=True):
        try:
            expected.append(Counter(form.checked_parts(answer, text)))
        except UserError as error:
            raise UserError(f"{location}: {error.what}", where=where, fix=error.fix) from None
    answers = write_answers(lm, examples.prompts)
    predicted: list[Parts] = []
    unusable = []
    for reply, text in zip(answers, texts, strict=True):
        parts, problems = form.parts(reply.text, text)
        predicted.append(Counter(parts))
        unusable.append(len(problems))
    rows = class_metrics(expected, predicted)
    exact = [want == got and not wrong for want, got, wrong in zip(expected, predicted, unusable, strict=True)]
    record_f1 = [
        # Without spans and without a wrong one, a record is right.
        _f1((want & got).total(), want.total(), got.total() + wrong) if want or got or wrong else 1.0
        for want, got, wrong in zip(expected, predicted, unusable, strict=True)
    ]
    correct, support = sum(row.correct for row in rows), sum(row.support for row in rows)
    # A part that cannot be used belongs to no label, and is wrong all the same.
    written = sum(row.predicted for row in rows) + sum(unusable)
    metrics = {
        "accuracy": float(np.mean(exact)),
        "precision": correct / written if written else 0.0,
        "recall": correct / support if support else 0.0,
        "micro_f1": _f1(correct, support, written),
        "macro_f1": macro_f1(rows),
    }
    valid = [reply.finished and not wrong for reply, wrong in zip(answers, unusable, strict=True)]
    scored = from_generations(answers, exact if kind == "choices" else record_f1, valid, metrics)
    return replace(scored, per_class=rows)


def class_metrics(expected: Sequence[Parts], predicted: Sequence[Parts]) -> list[ClassMetrics]:
    """Counts the parts of each label that is expected or written, by name."""
    support, written, correct = Counter[str](), Counter[str](), Counter[str]()
    for want, got in zip(expected, predicted, strict=True):
        for counts, parts in ((support, want), (written, got), (correct, want & got)):
            for (label, _), count in parts.items():
                counts[label] += count
    return [
        ClassMetrics(label, support[label], written[label], correct[label]) for label in sorted({*support, *written})
    ]


def _f1(correct: int, support: int, written: int) -> float:
    return 2 * correct / (support + written) if support + written else 0.0


def _wrong_task(kind: str, where: str) -> UserError:
    what = f"scorer {kind} measures a task of that kind"
    return UserError(what, where=f"{where}.scorer", fix=f"set `task.kind: {kind}`, or name another scorer")


CHOICES = Scorer(
    score_choices,
    main="micro_f1",
    paired="accuracy",
    metrics=frozenset({"accuracy", "precision", "recall", "micro_f1", "macro_f1", "invalid_rate"}),
    ensembles=True,
)

SPANS = replace(CHOICES, score=score_spans, paired="record_f1", metrics=CHOICES.metrics | {"record_f1"})
