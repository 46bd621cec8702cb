"""Supervised fine-tuning: cross-entropy over the supervised tokens."""

from dataclasses import dataclass
from typing import Any

import torch.nn.functional as functional
from torch import Tensor

from posttrain.models.language_model import LanguageModel
from posttrain.train.examples import IGNORED, Batch


@dataclass(frozen=True)
class Loss:
    """sum: scalar float32 with its graph, in nats; count: supervised tokens in it."""

    sum: Tensor
    count: int


def sft(lm: LanguageModel, batch: Batch) -> Loss:
    """Negative log-likelihood of the supervised tokens, each given all tokens before it.

    The rows' shared beginning (system message, template) is computed once and its keys and values are given to all
    rows; its gradient is the sum over the rows, so nothing changes but the cost. Only positions that predict a
    supervised token go through the output head.
    """
    hidden = lm.decoder(
        input_ids=batch.inputs,
        attention_mask=batch.mask,
        past_key_values=_read_prefix(lm, batch),
        use_cache=len(batch.prefix) > 0,
    ).last_hidden_state
    supervised = batch.targets != IGNORED
    logits = lm.logits(hidden[supervised])
    return Loss(functional.cross_entropy(logits, batch.targets[supervised], reduction="sum"), batch.count)


def _read_prefix(lm: LanguageModel, batch: Batch) -> Any:
    """The key-value cache of the shared beginning, one copy a row, or None where there is none."""
    from transformers import DynamicCache

    if not len(batch.prefix):
        return None
    cache = DynamicCache(config=lm.model.config)
    lm.decoder(input_ids=batch.prefix[None], past_key_values=cache, use_cache=True)
    cache.batch_repeat_interleave(len(batch.inputs))
    return cache
