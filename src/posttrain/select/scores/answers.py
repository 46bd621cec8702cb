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
import torch

from posttrain.models.task import TaskConfig
from posttrain.select.scores.passes import ScoreGroup, ScoringInput, to_list_column

if TYPE_CHECKING:
    from posttrain.models.chat import TokenizedExample
    from posttrain.models.language_model import LanguageModel

_CHUNK = 64

_BATCH_SIZE = 8  # sequences of a forward pass

_LOGITS_BLOCK = 256  # a vocabulary of numbers each

log = logging.getLogger("posttrain")

_VERBALISED_CHUNK = 64

_MAX_REPLY_TOKENS = 8

_CONFIDENCE_PROMPT = (
    "How likely is it that your answer is right? Reply with one whole number from 0 (surely wrong) to 100 (surely "
    "right), and nothing else."
)

_CONFIDENCE_REPLY = re.compile(r"([0-9]{1,3})\s*%?\.?")

_PERPLEXITY_CHUNK = 256


def answer_group() -> ScoreGroup:
    """The greedy answer, ``predicted``; its ``log_probability`` in nats over ``tokens``; ``embedding`` [N, D]."""

    def score(lm: LanguageModel, records: Sequence[ScoringInput]) -> pa.Table:
        from posttrain.models.generate import generate
        from posttrain.models.likelihood import answer_log_likelihoods, prompt_embeddings

        prompts = [one.prompt for one in records]
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
    """``log_probability`` of an answer that is given, in nats over ``tokens``."""

    def score(lm: LanguageModel, records: Sequence[ScoringInput]) -> pa.Table:
        from posttrain.models.likelihood import answer_log_likelihoods

        sums, counts = answer_log_likelihoods(lm, [one.prompt for one in records], [one.answers[0] for one in records])
        return pa.table({"log_probability": pa.array(sums, pa.float64()), "tokens": pa.array(counts, pa.int64())})

    return ScoreGroup("likelihood", 1, {}, score, _CHUNK)


def surprisal(table: pa.Table) -> npt.NDArray[np.float64]:
    """Nats a token, float64 [N] >= 0, of a table with ``log_probability`` and ``tokens``."""
    sums, counts = table["log_probability"].to_numpy(), table["tokens"].to_numpy()
    found: npt.NDArray[np.float64] = np.abs(sums / np.maximum(counts, 1))
    return found


def token_entropy_group() -> ScoreGroup:
    """``token_entropy``: mean over the answer's tokens of the entropy of the next token, in nats."""

    def score(lm: LanguageModel, records: Sequence[ScoringInput]) -> pa.Table:
        found = mean_token_entropies(lm, [encode_answer(lm, one) for one in records])
        return pa.table({"token_entropy": pa.array(found, pa.float64())})

    return ScoreGroup("token_entropy", 1, {}, score, _CHUNK)


def encode_answer(lm: LanguageModel, record: ScoringInput) -> TokenizedExample:
    """A record's prompt and its answer with the stop token; the answer alone is supervised."""
    from posttrain.models.chat import TokenizedExample

    before, answer = lm.prompt_ids(record.prompt), lm.answer_ids(record.answers[0])
    return TokenizedExample(before + answer, [False] * len(before) + [True] * len(answer))


@torch.inference_mode()
def mean_token_entropies(lm: LanguageModel, sequences: Sequence[TokenizedExample]) -> npt.NDArray[np.float64]:
    """Mean entropy of the model's next token over each sequence's supervised tokens, in nats: float64 [N].

    Over the whole vocabulary, as the length-normalised predictive entropy of A. Malinin and M. Gales (ICLR 2021) has it
    for one sequence.
    """
    found = np.zeros(len(sequences))
    order = sorted(range(len(sequences)), key=lambda row: (len(sequences[row].ids), row))
    for start in range(0, len(order), _BATCH_SIZE):
        rows = order[start : start + _BATCH_SIZE]
        width = len(sequences[rows[-1]].ids)
        # What a causal model reads behind a sequence does not reach back into it, so no mask is needed.
        ids = torch.full((len(rows), width), lm.tokenizer.pad_token_id or 0)
        for place, row in enumerate(rows):
            ids[place, : len(sequences[row].ids)] = torch.tensor(sequences[row].ids)
        hidden = lm.decoder(input_ids=ids.to(lm.device), use_cache=False).last_hidden_state
        for place, row in enumerate(rows):
            before = [at - 1 for at, on in enumerate(sequences[row].supervised) if on and at > 0]
            total = 0.0
            for first in range(0, len(before), _LOGITS_BLOCK):
                logs = lm.logits(hidden[place, before[first : first + _LOGITS_BLOCK]]).log_softmax(-1)
                total -= float((logs.exp() * logs).sum(-1).double().sum())
            found[row] = total / max(1, len(before))
    return found


def verbalised_group() -> ScoreGroup:
    """``verbalised_confidence``: what the model says when asked how sure it is of an answer, from 0 to 1; else NaN.

    K. Tian et al., Just Ask for Calibration, EMNLP 2023 (arXiv:2305.14975): the answer first, then, in a turn of its
    own, the probability.
    """

    def score(lm: LanguageModel, records: Sequence[ScoringInput]) -> pa.Table:
        from posttrain.models.generate import generate
        from posttrain.models.language_model import LanguageModel

        # The task's template goes around what was asked first, and not around the question that is put now.
        plain = LanguageModel(lm.model, lm.tokenizer, TaskConfig(max_new_tokens=_MAX_REPLY_TOKENS))
        prompts = [
            [
                *lm.task.turns(one.prompt),
                {"role": "assistant", "content": one.answers[0]},
                {"role": "user", "content": _CONFIDENCE_PROMPT},
            ]
            for one in records
        ]
        found = [stated_confidence(reply.text) for reply in generate(plain, prompts)]
        return pa.table({"verbalised_confidence": pa.array(found, pa.float64())})

    return ScoreGroup("verbalised", 1, {}, score, _VERBALISED_CHUNK)


def stated_confidence(reply: str) -> float:
    """The number that a reply is, over 100: ``80``, ``80%`` or ``80.``; NaN for a reply with anything else in it."""
    found = _CONFIDENCE_REPLY.fullmatch(reply.strip())
    number = int(found[1]) if found else 101
    return number / 100 if number <= 100 else math.nan


def perplexity_group() -> ScoreGroup:
    """``perplexity`` of the input's words, without system message and template; NaN for fewer than two tokens."""

    def score(lm: LanguageModel, records: Sequence[ScoringInput]) -> pa.Table:
        from posttrain.models.likelihood import text_log_likelihoods

        texts = ["\n".join(turn["content"] for turn in one.prompt) for one in records]
        sums, counts = text_log_likelihoods(lm, texts)
        found = np.full(len(texts), np.nan)
        told = counts > 0
        found[told] = np.exp(-sums[told] / counts[told])
        return pa.table({"perplexity": pa.array(found, pa.float64())})

    return ScoreGroup("perplexity", 1, {}, score, _PERPLEXITY_CHUNK)
