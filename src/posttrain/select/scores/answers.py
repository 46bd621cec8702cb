"""Greedy answers and the model's confidence in them, the loss of right answers, and the perplexity of the input."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from posttrain.select.scores.context import ScoringBatch
from posttrain.select.scores.passes import ScoreGroup, ScoringInput, to_list_column
from posttrain.select.scores.uncertainty import Floats

if TYPE_CHECKING:
    from posttrain.models.language_model import LanguageModel

_CHUNK = 64
_PERPLEXITY_CHUNK = 256


def score_loss(batch: ScoringBatch) -> Floats:
    """Scores labelled records by the loss of the right answer, nats per token."""
    return surprisal(batch.scoring.run(likelihood_group(), batch.inputs_with_answers))


def score_perplexity(batch: ScoringBatch) -> Floats:
    """Scores records by the perplexity of the input."""
    values: Floats = batch.scoring.run(perplexity_group(), batch.inputs)["perplexity"].to_numpy()
    return values


def answer_group() -> ScoreGroup:
    """Computes the greedy answer ``predicted``, its ``log_probability`` (nats), ``tokens`` and ``embedding`` [N, D]."""

    def score(lm: LanguageModel, records: Sequence[ScoringInput]) -> pa.Table:
        from posttrain.models.generator import greedy_answers
        from posttrain.models.likelihood import answer_log_likelihoods, prompt_embeddings

        prompts = [record.prompt for record in records]
        answers = [answer.text for answer in greedy_answers(lm, prompts)]
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
    """Returns nats per token, float64 [N] >= 0, from a table with ``log_probability`` and ``tokens``."""
    sums, counts = table["log_probability"].to_numpy(), table["tokens"].to_numpy()
    # Not a negation, which would give an answer that is certain -0.0.
    nats: npt.NDArray[np.float64] = np.abs(sums / np.maximum(counts, 1))
    return nats


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
