"""A regular expression finds what it looks for in the written answer."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from posttrain.evaluate.config import SuiteConfig
from posttrain.evaluate.examples import Examples
from posttrain.evaluate.scorers.base import Scored, Scorer, from_answers, normalised
from posttrain.store.errors import UserError

if TYPE_CHECKING:
    from posttrain.models.language_model import LanguageModel


def score(lm: LanguageModel, examples: Examples, suite: SuiteConfig, where: str) -> Scored:
    """Without a group: 1 where the pattern occurs in the answer, and an answer is invalid if it was cut off.

    With a group (``#### (-?\\d+)``): the last match's first group is compared with that of the expected
    answer, or with the whole expected answer where the pattern does not occur in it; an answer without a
    match is invalid.
    """
    from posttrain.models.generate import generate

    if suite.pattern is None:
        raise UserError("scorer regex needs a pattern", where=where, fix="set `pattern`")
    pattern = re.compile(suite.pattern)
    expected = examples.answers(where) if pattern.groups else []
    answers = generate(lm, examples.prompts)
    if not pattern.groups:
        found = [pattern.search(answer.text) is not None for answer in answers]
        return from_answers(answers, found, [answer.finished for answer in answers])
    picked = [_last_group(pattern, answer.text) for answer in answers]
    wanted = [_last_group(pattern, answer) or answer for answer in expected]
    right = [
        part is not None and normalised(part) == normalised(want) for part, want in zip(picked, wanted, strict=True)
    ]
    return from_answers(answers, right, [part is not None for part in picked])


def _last_group(pattern: re.Pattern[str], text: str) -> str | None:
    matches = [match.group(1) for match in pattern.finditer(text)]
    return matches[-1] if matches else None


REGEX = Scorer(score, main="accuracy", paired="accuracy", metrics=frozenset({"accuracy", "invalid_rate"}))
