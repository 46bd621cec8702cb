"""The most probable label of the closed set equals the expected one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from posttrain.evaluate.config import SuiteConfig
from posttrain.evaluate.examples import Examples
from posttrain.evaluate.scorers.base import Scored, Scorer, normalised
from posttrain.store.errors import UserError

if TYPE_CHECKING:
    from posttrain.models.language_model import LanguageModel


def score(lm: LanguageModel, examples: Examples, suite: SuiteConfig, where: str) -> Scored:
    """1 where the expected label has the greatest probability, else 0; every answer is valid.

    Raises:
        UserError: if the task has no label set, or a record's answer is outside it.
    """
    from posttrain.models.likelihood import label_scores

    labels = lm.task.label_set
    if not labels:
        raise UserError("scorer label_likelihood needs a label set", where=where, fix="set `task.labels`")
    position = {normalised(label): index for index, label in enumerate(labels)}
    answers = examples.answers(where)
    for answer, place in zip(answers, examples.places, strict=True):
        if normalised(answer) not in position:
            raise UserError(f"{place}: label `{answer}` is not in task.labels", where=where)
    truth = np.array([position[normalised(answer)] for answer in answers])
    scores = label_scores(lm, examples.prompts, labels, exact=truth.tolist()).log_probabilities
    found = scores.astype(np.float64)
    best = found.argmax(axis=1)
    rows = np.arange(len(truth))
    return Scored(
        predicted=[labels[index] for index in best],
        score=(best == truth).astype(np.float64),
        valid=np.ones(len(truth), bool),
        confidence=np.minimum(np.exp(found[rows, best]), 1.0),
        log_likelihood=found[rows, truth],
        tokens=np.zeros(len(truth), np.int64),
        labels=scores,
    )


LABEL_LIKELIHOOD = Scorer(
    score,
    main="accuracy",
    paired="accuracy",
    metrics=frozenset({"accuracy", "macro_f1", "invalid_rate", "log_likelihood", "log_likelihood_sum", "ece"}),
)
