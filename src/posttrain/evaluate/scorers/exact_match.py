"""The written answer equals the expected one, whitespace aside."""

from __future__ import annotations

from typing import TYPE_CHECKING

from posttrain.evaluate.config import SuiteConfig
from posttrain.evaluate.examples import Examples
from posttrain.evaluate.scorers.base import Scored, Scorer, from_answers, normalised

if TYPE_CHECKING:
    from posttrain.models.language_model import LanguageModel


def score(lm: LanguageModel, examples: Examples, suite: SuiteConfig, where: str) -> Scored:
    """1 for an equal answer, else 0. Invalid: cut off, or outside the label set where there is one."""
    from posttrain.models.generate import generate

    expected = examples.answers(where)
    answers = generate(lm, examples.prompts)
    allowed = {normalised(label) for label in lm.task.label_set}
    written = [normalised(answer.text) for answer in answers]
    right = [float(text == normalised(answer)) for text, answer in zip(written, expected, strict=True)]
    valid = [
        answer.finished and (not allowed or text in allowed) for answer, text in zip(answers, written, strict=True)
    ]
    return from_answers(answers, right, valid)


EXACT_MATCH = Scorer(
    score,
    main="accuracy",
    paired="accuracy",
    metrics=frozenset({"accuracy", "invalid_rate"}),
    label_metrics=frozenset({"macro_f1"}),
)
