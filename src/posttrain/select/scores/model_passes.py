"""The entropy of each token of an answer.

`posttrain.select.scores.answers` imports this module only when a model has to score something: reading finished scores
needs no torch, whose import takes longer than the rest of a verb.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from posttrain.models.chat import TokenizedExample
from posttrain.select.scores.passes import ScoringInput

if TYPE_CHECKING:
    from posttrain.models.language_model import LanguageModel

_BATCH_SIZE = 8  # sequences of a forward pass
_LOGITS_BLOCK = 256  # tokens, each with logits of the whole vocabulary


def encode_answer(lm: LanguageModel, record: ScoringInput) -> TokenizedExample:
    """Encodes a record's prompt and its answer with the stop token; only the answer is supervised."""
    before, answer = lm.prompt_ids(record.prompt), lm.answer_ids(record.answers[0])
    return TokenizedExample(before + answer, [False] * len(before) + [True] * len(answer))


@torch.inference_mode()
def mean_token_entropies(lm: LanguageModel, sequences: Sequence[TokenizedExample]) -> npt.NDArray[np.float64]:
    """Computes the mean entropy of the next token over each sequence's supervised tokens, in nats: float64 [N].

    Over the whole vocabulary, as the length-normalised predictive entropy of A. Malinin and M. Gales (ICLR 2021) has it
    for a single sequence.
    """
    entropies = np.zeros(len(sequences))
    # By length, so that little of a batch is padding.
    order = sorted(range(len(sequences)), key=lambda row: (len(sequences[row].ids), row))
    for start in range(0, len(order), _BATCH_SIZE):
        rows = order[start : start + _BATCH_SIZE]
        width = len(sequences[rows[-1]].ids)
        # No attention mask: the padding is on the right, where a causal model's earlier tokens do not see it.
        ids = torch.full((len(rows), width), lm.tokenizer.pad_token_id or 0)
        for index, row in enumerate(rows):
            ids[index, : len(sequences[row].ids)] = torch.tensor(sequences[row].ids)
        hidden = lm.decoder(input_ids=ids.to(lm.device), use_cache=False).last_hidden_state
        for index, row in enumerate(rows):
            before = [at - 1 for at, on in enumerate(sequences[row].supervised) if on and at > 0]
            total = 0.0
            # In blocks: logits of a long answer over the whole vocabulary would not fit into memory.
            for first in range(0, len(before), _LOGITS_BLOCK):
                logs = lm.logits(hidden[index, before[first : first + _LOGITS_BLOCK]]).log_softmax(-1)
                total -= float((logs.exp() * logs).sum(-1).double().sum())
            entropies[row] = total / max(1, len(before))
    return entropies
