"""How sure the model says that it is of its answer."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

import pyarrow as pa

from posttrain.models.task import TaskConfig
from posttrain.select.scores.group import Asked, Group

if TYPE_CHECKING:
    from posttrain.models.language_model import LanguageModel

log = logging.getLogger("posttrain")

_AT_ONCE = 64
_TOKENS = 8
_QUESTION = (
    "How likely is it that your answer is right? Reply with one whole number from 0 (surely wrong) to 100 (surely "
    "right), and nothing else."
)
_REPLY = re.compile(r"([0-9]{1,3})\s*%?\.?")


def verbalised_group() -> Group:
    """``verbalised_confidence``: what the model says when asked how sure it is of an answer, from 0 to 1; else NaN.

    K. Tian et al., Just Ask for Calibration, EMNLP 2023 (arXiv:2305.14975): the answer first, then, in a turn of its
    own, the probability.
    """

    def score(lm: LanguageModel, records: Sequence[Asked]) -> pa.Table:
        from posttrain.models.generate import generate
        from posttrain.models.language_model import LanguageModel

        # The task's template goes around what was asked first, and not around the question that is put now.
        plain = LanguageModel(lm.model, lm.tokenizer, TaskConfig(max_new_tokens=_TOKENS))
        prompts = [
            [
                *lm.task.turns(one.prompt),
                {"role": "assistant", "content": one.answers[0]},
                {"role": "user", "content": _QUESTION},
            ]
            for one in records
        ]
        found = [stated_confidence(reply.text) for reply in generate(plain, prompts)]
        return pa.table({"verbalised_confidence": pa.array(found, pa.float64())})

    return Group("verbalised", 1, {}, score, _AT_ONCE)


def stated_confidence(reply: str) -> float:
    """The number that a reply is, over 100: ``80``, ``80%`` or ``80.``; NaN for a reply with anything else in it."""
    found = _REPLY.fullmatch(reply.strip())
    number = int(found[1]) if found else 101
    return number / 100 if number <= 100 else math.nan
