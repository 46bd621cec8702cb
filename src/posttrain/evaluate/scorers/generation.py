"""Scorers of generated answers: exact match, regular expression, token F1, the user's own function."""

from __future__ import annotations

import math
import re
import string
from collections import Counter
from typing import TYPE_CHECKING

from posttrain.evaluate.config import SuiteConfig
from posttrain.evaluate.scorers.base import Examples, Scorer, ScorerOutput, from_generations, write_answers
from posttrain.store.errors import UserError, WorkError
from posttrain.store.extensions import load_function
from posttrain.store.text_files import normalise_lines, normalise_text

if TYPE_CHECKING:
    from posttrain.models.ensembles.ensemble import Ensemble
    from posttrain.models.language_model import LanguageModel

_ARTICLES = re.compile(r"\b(a|an|the)\b")

_PUNCTUATION = str.maketrans("", "", string.punctuation)


def score_exact_match(lm: LanguageModel | Ensemble, examples: Examples, suite: SuiteConfig, where: str) -> ScorerOutput:
    """Scores an equal answer 1, any other 0. Invalid: cut off, or outside the label set where there is one.

    Whitespace counts in answers of several lines, such as programs, but not in labels.
    """
    expected = examples.answers(where)
    answers = write_answers(lm, examples.prompts)
    normalise = normalise_text if lm.task.label_set else normalise_lines
    allowed = {normalise(label) for label in lm.task.label_set}
    written = [normalise(answer.text) for answer in answers]
    right = [float(text == normalise(answer)) for text, answer in zip(written, expected, strict=True)]
    valid = [
        answer.finished and (not allowed or text in allowed) for answer, text in zip(answers, written, strict=True)
    ]
    return from_generations(answers, right, valid)


EXACT_MATCH = Scorer(
    score_exact_match,
    main="accuracy",
    paired="accuracy",
    metrics=frozenset({"accuracy", "invalid_rate"}),
    label_metrics=frozenset({"macro_f1"}),
    ensembles=True,
)


def score_regex(lm: LanguageModel | Ensemble, examples: Examples, suite: SuiteConfig, where: str) -> ScorerOutput:
    """Scores an answer 1 where the pattern occurs in it, and invalid if it was cut off.

    With a group (``#### (-?\\d+)``), the last match's first group is compared with that of the expected
    answer, or with the whole expected answer where the pattern does not occur in it; an answer without a
    match is invalid.
    """
    if suite.pattern is None:
        raise UserError("scorer regex needs a pattern", where=where, fix="set `pattern`")
    pattern = re.compile(suite.pattern)
    # Without a group no answer is compared, so records need none.
    expected = examples.answers(where) if pattern.groups else []
    answers = write_answers(lm, examples.prompts)
    if not pattern.groups:
        matches = [pattern.search(answer.text) is not None for answer in answers]
        return from_generations(answers, matches, [answer.finished for answer in answers])
    picked = [_last_group(pattern, answer.text) for answer in answers]
    references = [_last_group(pattern, answer) or answer for answer in expected]
    correct = [
        extracted is not None and normalise_lines(extracted) == normalise_lines(want)
        for extracted, want in zip(picked, references, strict=True)
    ]
    return from_generations(answers, correct, [extracted is not None for extracted in picked])


def _last_group(pattern: re.Pattern[str], text: str) -> str | None:
    # The last: a chain of reasoning may state intermediate results in the same form.
    matches = [match.group(1) for match in pattern.finditer(text)]
    return matches[-1] if matches else None


REGEX = Scorer(
    score_regex, main="accuracy", paired="accuracy", metrics=frozenset({"accuracy", "invalid_rate"}), ensembles=True
)


def score_token_f1(lm: LanguageModel | Ensemble, examples: Examples, suite: SuiteConfig, where: str) -> ScorerOutput:
    """Scores answers by the F1 of their words; an answer that was cut off is invalid."""
    expected = examples.answers(where)
    answers = write_answers(lm, examples.prompts)
    values = [token_f1(answer.text, want) for answer, want in zip(answers, expected, strict=True)]
    return from_generations(answers, values, [answer.finished for answer in answers])


def token_f1(answer: str, expected: str) -> float:
    """Computes the harmonic mean of precision and recall over the multiset of words, as SQuAD does.

    Source: P. Rajpurkar et al., SQuAD: 100,000+ Questions for Machine Comprehension of Text, EMNLP 2016.

    Both are lower-cased, stripped of ASCII punctuation and of English articles. Two answers that are then
    empty score 1; one that is empty against one that is not scores 0.
    """
    answer_words, expected_words = _words(answer), _words(expected)
    if not answer_words or not expected_words:
        return float(answer_words == expected_words)
    common = (Counter(answer_words) & Counter(expected_words)).total()
    return 2 * common / (len(answer_words) + len(expected_words))


def _words(text: str) -> list[str]:
    return _ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split()


TOKEN_F1 = Scorer(
    score_token_f1, main="token_f1", paired="token_f1", metrics=frozenset({"token_f1", "invalid_rate"}), ensembles=True
)


def score_python(lm: LanguageModel | Ensemble, examples: Examples, suite: SuiteConfig, where: str) -> ScorerOutput:
    """Calls ``function(answer, expected, prompt)`` for every record; an answer that was cut off is invalid.

    ``answer`` is the text that the model wrote, ``expected`` the record's answer or None, ``prompt`` the
    turns. It returns a number or a bool; higher is better.

    Raises:
        UserError: if the function cannot be imported.
        WorkError: if it fails on a record or returns no finite number, naming the record.
    """
    # Before the model answers anything: a mistake in the path shows at once.
    function = load_function(suite.function or "", where)
    answers = write_answers(lm, examples.prompts)
    values = []
    for answer, reference, prompt, location in zip(
        answers, examples.expected, examples.prompts, examples.locations, strict=True
    ):
        try:
            value = float(function(answer.text, reference, prompt))
        except Exception as error:  # the user's code may raise anything
            raise WorkError(f"{suite.function} failed on {location}: {type(error).__name__}: {error}") from error
        # One NaN would make the mean, the interval and so every rule on them NaN.
        if not math.isfinite(value):
            raise WorkError(f"{suite.function} returned {value} for {location}; a finite number is needed")
        values.append(value)
    return from_generations(answers, values, [answer.finished for answer in answers])


PYTHON = Scorer(
    score_python, main="score", paired="score", metrics=frozenset({"score", "invalid_rate"}), ensembles=True
)
