"""How probable the expected answer, or a plain text, is; nothing is written."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from posttrain.evaluate.config import SuiteConfig
from posttrain.evaluate.examples import Examples
from posttrain.evaluate.scorers.base import Scored, Scorer

if TYPE_CHECKING:
    from posttrain.models.language_model import LanguageModel


def score(lm: LanguageModel, examples: Examples, suite: SuiteConfig, where: str) -> Scored:
    """The log-likelihood in nats of each expected answer, stop token included, or of each plain text."""
    from posttrain.models.likelihood import answer_log_likelihoods
    from posttrain.models.text_likelihood import text_log_likelihoods

    answers = examples.answers(where)
    sums, counts = np.zeros(len(answers)), np.zeros(len(answers), np.int64)
    chats = [row for row, prompt in enumerate(examples.prompts) if prompt]
    texts = [row for row, prompt in enumerate(examples.prompts) if not prompt]
    if chats:
        prompts = [examples.prompts[row] for row in chats]
        sums[chats], counts[chats] = answer_log_likelihoods(lm, prompts, [answers[row] for row in chats])
    if texts:
        sums[texts], counts[texts] = text_log_likelihoods(lm, [answers[row] for row in texts])
    return Scored(
        predicted=[""] * len(answers),
        score=sums,
        valid=np.ones(len(answers), bool),
        confidence=np.exp(sums / np.maximum(counts, 1)),
        log_likelihood=sums,
        tokens=counts,
    )


PERPLEXITY = Scorer(
    score,
    main="perplexity",
    paired="log_likelihood",
    metrics=frozenset({"perplexity", "log_likelihood", "log_likelihood_sum", "tokens"}),
    plain_text=True,
)
