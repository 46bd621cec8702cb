"""Overlap of words between the written and the expected answer, as SQuAD scores it.

Source: P. Rajpurkar et al., SQuAD: 100,000+ Questions for Machine Comprehension of Text, EMNLP 2016.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from typing import TYPE_CHECKING

from posttrain.evaluate.config import SuiteConfig
from posttrain.evaluate.examples import Examples
from posttrain.evaluate.scorers.base import Scored, Scorer, from_answers

if TYPE_CHECKING:
    from posttrain.models.language_model import LanguageModel

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def score(lm: LanguageModel, examples: Examples, suite: SuiteConfig, where: str) -> Scored:
    """F1 of the answers' words; an answer that was cut off is invalid."""
    from posttrain.models.generate import generate

    expected = examples.answers(where)
    answers = generate(lm, examples.prompts)
    values = [token_f1(answer.text, want) for answer, want in zip(answers, expected, strict=True)]
    return from_answers(answers, values, [answer.finished for answer in answers])


def token_f1(answer: str, expected: str) -> float:
    """Harmonic mean of precision and recall over the multiset of words.

    Both are lower-cased, stripped of ASCII punctuation and of English articles. Two answers that are then
    empty score 1; one that is empty against one that is not scores 0.
    """
    ours, theirs = _words(answer), _words(expected)
    if not ours or not theirs:
        return float(ours == theirs)
    common = (Counter(ours) & Counter(theirs)).total()
    return 2 * common / (len(ours) + len(theirs))


def _words(text: str) -> list[str]:
    return _ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split()


TOKEN_F1 = Scorer(score, main="token_f1", paired="token_f1", metrics=frozenset({"token_f1", "invalid_rate"}))
