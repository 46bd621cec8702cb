"""How probable the expected answer, or a plain text, is; nothing is written."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from posttrain.evaluate.config import SuiteConfig
from posttrain.evaluate.examples import Examples
from posttrain.evaluate.scorers.base import Scored, Scorer
from posttrain.store.progress import task

if TYPE_CHECKING:
    from posttrain.models.language_model import LanguageModel


def score(lm: LanguageModel, examples: Examples, suite: SuiteConfig, where: str) -> Scored:
    """The log-likelihood in nats of each expected answer, stop token included, or of each plain text."""
    from posttrain.models.likelihood import answer_log_likelihoods

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


def text_log_likelihoods(lm: LanguageModel, texts: Sequence[str], window: int = 2048) -> tuple[np.ndarray, np.ndarray]:
    """Log-likelihood of plain texts, without any chat template.

    A text longer than the window, or than the model's context, is read in windows that share one token, so
    every token but a text's first is predicted once.

    Args:
        lm: the model.
        texts: N texts.
        window: longest stretch that the model reads at once, in tokens.

    Returns:
        Sums of log-probabilities, float64 [N], in nats; numbers of predicted tokens, int64 [N].
    """
    import torch

    width = min(window, lm.model.config.get_text_config().max_position_embeddings)
    sums, counts = np.zeros(len(texts)), np.zeros(len(texts), np.int64)
    with torch.inference_mode(), task("scoring texts", len(texts), "records") as advance:
        for row, text in enumerate(texts):
            ids = torch.tensor([lm.tokenizer(text)["input_ids"]], device=lm.device, dtype=torch.long)
            counts[row] = max(0, ids.shape[1] - 1)
            for start in range(0, int(counts[row]), width - 1):
                part = ids[:, start : start + width]
                hidden = lm.decoder(input_ids=part, use_cache=False).last_hidden_state
                found = lm.logits(hidden[0, :-1]).log_softmax(-1).gather(1, part[0, 1:, None])
                sums[row] += float(found.double().sum())
            advance(1)
    return sums, counts


PERPLEXITY = Scorer(
    score,
    main="perplexity",
    paired="log_likelihood",
    metrics=frozenset({"perplexity", "log_likelihood", "log_likelihood_sum", "tokens"}),
    plain_text=True,
)
