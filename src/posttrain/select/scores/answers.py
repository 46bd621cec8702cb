"""Greedy answers and the model's confidence in them: likelihood, token entropy, stated confidence; input perplexity."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from posttrain.models.task import TaskConfig
from posttrain.select.scores.context import ScoringBatch
from posttrain.select.scores.passes import ScoreGroup, ScoringInput, to_list_column
from posttrain.select.scores.uncertainty import Floats

if TYPE_CHECKING:
    from posttrain.models.language_model import LanguageModel

log = logging.getLogger("posttrain")

_CHUNK = 64
_PERPLEXITY_CHUNK = 256

_MAX_REPLY_TOKENS = 8  # a number and a percent sign; a model that goes on gives no number
_CONFIDENCE_PROMPT = (
    "How likely is it that your answer is right? Reply with one whole number from 0 (surely wrong) to 100 (surely "
    "right), and nothing else."
)
_CONFIDENCE_REPLY = re.compile(r"([0-9]{1,3})\s*%?\.?")


def score_log_probability(batch: ScoringBatch) -> Floats:
    """Scores records by the log-probability of the greedy answer."""
    assert batch.base is not None
    values: Floats = batch.base["log_probability"].to_numpy()
    return values


def score_token_entropy(batch: ScoringBatch) -> Floats:
    """Scores records by the mean entropy of the greedy answer's tokens."""
    values: Floats = batch.scoring.run(token_entropy_group(), batch.inputs_with_answers)["token_entropy"].to_numpy()
    return values


def score_perplexity(batch: ScoringBatch) -> Floats:
    """Scores records by the perplexity of the input."""
    values: Floats = batch.scoring.run(perplexity_group(), batch.inputs)["perplexity"].to_numpy()
    return values


def score_verbalised_confidence(batch: ScoringBatch) -> Floats:
    """Scores records by the confidence that the model states; warns of replies without a number."""
    values: Floats = batch.scoring.run(verbalised_group(), batch.inputs_with_answers)[
        "verbalised_confidence"
    ].to_numpy()
    if missing := int(np.isnan(values).sum()):
        log.warning("  verbalised_confidence: no number for %d of %d records", missing, len(values))
    return values


def answer_group() -> ScoreGroup:
    """Computes the greedy answer ``predicted``, its ``log_probability`` (nats), ``tokens`` and ``embedding`` [N, D]."""

    def score(lm: LanguageModel, records: Sequence[ScoringInput]) -> pa.Table:
        from posttrain.models.generate import generate
        from posttrain.models.likelihood import answer_log_likelihoods, prompt_embeddings

        prompts = [record.prompt for record in records]
        answers = [answer.text for answer in generate(lm, prompts)]
        sums, counts = answer_log_likelihoods(lm, prompts, answers)
        return pa.table(
            {
                "predicted": pa.array(answers, pa.string()),
                "log_probability": pa.array(sums, pa.float64()),
                "tokens": pa.array(counts, pa.int64()),
                "embedding": to_list_column(prompt_embeddings(lm, prompts)),
            }
        )

    return ScoreGroup("answers", 1, {}, score, _CHUNK)


def likelihood_group() -> ScoreGroup:
    """Computes the ``log_probability`` of each record's answer, in nats over ``tokens``."""

    def score(lm: LanguageModel, records: Sequence[ScoringInput]) -> pa.Table:
        from posttrain.models.likelihood import answer_log_likelihoods

        prompts, answers = [record.prompt for record in records], [record.answers[0] for record in records]
        sums, counts = answer_log_likelihoods(lm, prompts, answers)
        return pa.table({"log_probability": pa.array(sums, pa.float64()), "tokens": pa.array(counts, pa.int64())})

    return ScoreGroup("likelihood", 1, {}, score, _CHUNK)


def surprisal(table: pa.Table) -> npt.NDArray[np.float64]:
    """Returns nats a token, float64 [N] >= 0, from a table with ``log_probability`` and ``tokens``."""
    sums, counts = table["log_probability"].to_numpy(), table["tokens"].to_numpy()
    # Not a negation, which would give an answer that is certain -0.0.
    nats: npt.NDArray[np.float64] = np.abs(sums / np.maximum(counts, 1))
    return nats


def token_entropy_group() -> ScoreGroup:
    """Computes ``token_entropy``: the mean over the answer's tokens of the entropy of the next token, in nats."""

    def score(lm: LanguageModel, records: Sequence[ScoringInput]) -> pa.Table:
        from posttrain.select.scores.model_passes import encode_answer, mean_token_entropies

        entropies = mean_token_entropies(lm, [encode_answer(lm, record) for record in records])
        return pa.table({"token_entropy": pa.array(entropies, pa.float64())})

    return ScoreGroup("token_entropy", 1, {}, score, _CHUNK)


def verbalised_group() -> ScoreGroup:
    """Reads ``verbalised_confidence``: the confidence that the model states, from 0 to 1; NaN if it states none.

    K. Tian et al., Just Ask for Calibration, EMNLP 2023 (arXiv:2305.14975): the answer first, then, in a turn of its
    own, the probability.
    """

    def score(lm: LanguageModel, records: Sequence[ScoringInput]) -> pa.Table:
        from posttrain.models.generate import generate
        from posttrain.models.language_model import LanguageModel

        # Without the task's template: it belongs to the first question, not to the one about confidence.
        plain = LanguageModel(lm.model, lm.tokenizer, TaskConfig(max_new_tokens=_MAX_REPLY_TOKENS))
        prompts = [
            [
                *lm.task.turns(record.prompt),
                {"role": "assistant", "content": record.answers[0]},
                {"role": "user", "content": _CONFIDENCE_PROMPT},
            ]
            for record in records
        ]
        confidences = [stated_confidence(reply.text) for reply in generate(plain, prompts)]
        return pa.table({"verbalised_confidence": pa.array(confidences, pa.float64())})

    return ScoreGroup("verbalised", 1, {}, score, _CHUNK)


def stated_confidence(reply: str) -> float:
    """Parses a reply of one number over 100: ``80``, ``80%`` or ``80.``; NaN for a reply with anything else in it."""
    match = _CONFIDENCE_REPLY.fullmatch(reply.strip())
    # A reply with more in it is not parsed: the number in "1 of 10" is no percentage.
    number = int(match[1]) if match else 101
    return number / 100 if number <= 100 else math.nan


def perplexity_group() -> ScoreGroup:
    """Computes the ``perplexity`` of the input's text, without system message and template; NaN below two tokens."""

    def score(lm: LanguageModel, records: Sequence[ScoringInput]) -> pa.Table:
        from posttrain.models.likelihood import text_log_likelihoods

        texts = ["\n".join(turn["content"] for turn in record.prompt) for record in records]
        sums, counts = text_log_likelihoods(lm, texts)
        # NaN and not 1: one token has no context that it could be predicted from.
        perplexities = np.full(len(texts), np.nan)
        defined = counts > 0
        perplexities[defined] = np.exp(-sums[defined] / counts[defined])
        return pa.table({"perplexity": pa.array(perplexities, pa.float64())})

    return ScoreGroup("perplexity", 1, {}, score, _PERPLEXITY_CHUNK)
