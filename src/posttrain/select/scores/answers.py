"""What a model answers in its own words, and how sure it was of each token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch

from posttrain.select.scores.arrays import as_lists
from posttrain.select.scores.group import Asked, Group

if TYPE_CHECKING:
    from posttrain.models.chat import Encoded
    from posttrain.models.language_model import LanguageModel

_AT_ONCE = 64
_ROWS = 8  # sequences of a forward pass
_LOGIT_ROWS = 256  # a vocabulary of numbers each


def answer_group() -> Group:
    """The greedy answer, ``predicted``; its ``log_probability`` in nats over ``tokens``; ``embedding`` [N, D]."""

    def score(lm: LanguageModel, records: Sequence[Asked]) -> pa.Table:
        from posttrain.models.generate import generate
        from posttrain.models.likelihood import answer_log_likelihoods, embeddings

        prompts = [one.prompt for one in records]
        answers = [answer.text for answer in generate(lm, prompts)]
        sums, counts = answer_log_likelihoods(lm, prompts, answers)
        return pa.table(
            {
                "predicted": pa.array(answers, pa.string()),
                "log_probability": pa.array(sums, pa.float64()),
                "tokens": pa.array(counts, pa.int64()),
                "embedding": as_lists(embeddings(lm, prompts)),
            }
        )

    return Group("answers", 1, {}, score, _AT_ONCE)


def likelihood_group() -> Group:
    """``log_probability`` of an answer that is given, in nats over ``tokens``."""

    def score(lm: LanguageModel, records: Sequence[Asked]) -> pa.Table:
        from posttrain.models.likelihood import answer_log_likelihoods

        sums, counts = answer_log_likelihoods(lm, [one.prompt for one in records], [one.answers[0] for one in records])
        return pa.table({"log_probability": pa.array(sums, pa.float64()), "tokens": pa.array(counts, pa.int64())})

    return Group("likelihood", 1, {}, score, _AT_ONCE)


def surprisal(table: pa.Table) -> npt.NDArray[np.float64]:
    """Nats a token, float64 [N] >= 0, of a table with ``log_probability`` and ``tokens``."""
    sums, counts = table["log_probability"].to_numpy(), table["tokens"].to_numpy()
    found: npt.NDArray[np.float64] = np.abs(sums / np.maximum(counts, 1))
    return found


def token_entropy_group() -> Group:
    """``token_entropy``: mean over the answer's tokens of the entropy of the next token, in nats."""

    def score(lm: LanguageModel, records: Sequence[Asked]) -> pa.Table:
        found = mean_token_entropies(lm, [encoded(lm, one) for one in records])
        return pa.table({"token_entropy": pa.array(found, pa.float64())})

    return Group("token_entropy", 1, {}, score, _AT_ONCE)


def encoded(lm: LanguageModel, record: Asked) -> Encoded:
    """A record's prompt and its answer with the stop token; the answer alone is supervised."""
    from posttrain.models.chat import Encoded

    before, answer = lm.prompt_ids(record.prompt), lm.answer_ids(record.answers[0])
    return Encoded(before + answer, [False] * len(before) + [True] * len(answer))


@torch.inference_mode()
def mean_token_entropies(lm: LanguageModel, sequences: Sequence[Encoded]) -> npt.NDArray[np.float64]:
    """Mean entropy of the model's next token over each sequence's supervised tokens, in nats: float64 [N].

    Over the whole vocabulary, as the length-normalised predictive entropy of A. Malinin and M. Gales (ICLR 2021) has it
    for one sequence.
    """
    found = np.zeros(len(sequences))
    order = sorted(range(len(sequences)), key=lambda row: (len(sequences[row].ids), row))
    for start in range(0, len(order), _ROWS):
        rows = order[start : start + _ROWS]
        width = len(sequences[rows[-1]].ids)
        # What a causal model reads behind a sequence does not reach back into it, so no mask is needed.
        ids = torch.full((len(rows), width), lm.tokenizer.pad_token_id or 0)
        for place, row in enumerate(rows):
            ids[place, : len(sequences[row].ids)] = torch.tensor(sequences[row].ids)
        hidden = lm.decoder(input_ids=ids.to(lm.device), use_cache=False).last_hidden_state
        for place, row in enumerate(rows):
            before = [at - 1 for at, on in enumerate(sequences[row].supervised) if on and at > 0]
            total = 0.0
            for first in range(0, len(before), _LOGIT_ROWS):
                logs = lm.logits(hidden[place, before[first : first + _LOGIT_ROWS]]).log_softmax(-1)
                total -= float((logs.exp() * logs).sum(-1).double().sum())
            found[row] = total / max(1, len(before))
    return found
