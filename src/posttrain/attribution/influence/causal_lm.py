"""Causal language models with an adapter, as functional models over the supervised tokens."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from posttrain.attribution.influence.functional_model import Batch, FunctionalModel
from posttrain.attribution.influence.losses import IGNORE_INDEX, CrossEntropy
from posttrain.models.chat import TokenizedExample
from posttrain.models.language_model import LanguageModel
from posttrain.models.likelihood import context_length
from posttrain.models.loading import first_line
from posttrain.models.task import Turns
from posttrain.store.errors import UserError


def load_adapter(lm: LanguageModel, adapter: Path) -> LanguageModel:
    """Puts a saved adapter on a model; only its float32 weights require a gradient.

    Args:
        lm: the base model; peft changes it in place.
        adapter: a folder in peft's layout, with safetensors (peft's other format executes what it loads).

    Raises:
        UserError: the folder holds no adapter for this model.
    """
    from peft import PeftModel
    from safetensors import SafetensorError

    if not (adapter / "adapter_model.safetensors").is_file():
        raise UserError("no adapter_model.safetensors here", where=str(adapter), fix="name an adapter's folder")
    with warnings.catch_warnings():
        # peft triggers it inside transformers; no user can do anything about it.
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
        # peft only warns of an adapter of another model, and loads half of it: that is an error here.
        warnings.filterwarnings("error", "Found missing adapter keys")
        try:
            model: Any = PeftModel.from_pretrained(lm.model, str(adapter), is_trainable=True)
        except (ValueError, RuntimeError, KeyError, OSError, SafetensorError, UserWarning) as error:
            raise UserError(f"the adapter does not fit the model: {first_line(error)}", where=str(adapter)) from None
    return LanguageModel(model.eval(), lm.tokenizer, lm.task)


def encode_record(lm: LanguageModel, prompt: Turns, answer: str, *, earlier_turns: bool = False) -> TokenizedExample:
    """Tokenizes a record for `functional_causal_lm`: the rendered prompt, and an answer with its stop token.

    Args:
        lm: the model.
        prompt: the conversation up to the answer.
        answer: the supervised text; a test record's may be the model's own.
        earlier_turns: supervise the assistant's earlier turns as well, as supervised fine-tuning does.

    Raises:
        UserError: it is longer than the model's context.
    """
    whole = lm.encode(prompt, answer)
    if len(whole.ids) > context_length(lm):
        raise UserError(
            f"a record of {len(whole.ids)} tokens is longer than the model's {context_length(lm)}", where="influence"
        )
    if earlier_turns:
        return whole
    prompt_length = len(whole.ids) - len(lm.answer_ids(answer))
    return TokenizedExample(whole.ids, [position >= prompt_length for position in range(len(whole.ids))])


def functional_causal_lm(lm: LanguageModel) -> FunctionalModel:
    """Wraps a causal language model; its records are those of `encode_record`, its losses in nats.

    Only the parameters that require a gradient count: train an adapter, or load one with `load_adapter`. The loss of a
    record is the sum of its supervised tokens' negative log-probabilities. The base weights should be float32: in
    bfloat16 gradients of single records have 8 bits.

    Raises:
        UserError: no parameter requires a gradient.
    """
    return FunctionalModel(
        lm.model, _SupervisedLogits(lm), CrossEntropy(), _PaddedCollator(lm.tokenizer.pad_token_id or 0)
    )


@dataclass(frozen=True)
class _PaddedCollator:
    """Collates token ids [B, T], the positions [B, S] that predict supervised tokens, and those tokens [B, S]."""

    filler: int

    def __call__(self, records: Sequence[TokenizedExample]) -> Batch:
        width = max(len(record.ids) for record in records)
        # The first token has no position before it that could predict it.
        supervised = [[i for i, on in enumerate(record.supervised) if on and i > 0] for record in records]
        most = max(1, max(map(len, supervised)))
        ids = torch.full((len(records), width), self.filler)
        # Padded with position 0, whose target is ignored: a gather needs a valid index.
        before = torch.zeros(len(records), most, dtype=torch.long)
        targets = torch.full((len(records), most), IGNORE_INDEX)
        for row, (record, at) in enumerate(zip(records, supervised, strict=True)):
            ids[row, : len(record.ids)] = torch.tensor(record.ids)
            before[row, : len(at)] = torch.tensor(at, dtype=torch.long) - 1
            targets[row, : len(at)] = ids[row, at]
        return ids, before, targets


@dataclass(frozen=True)
class _SupervisedLogits:
    """Computes float32 logits [B, S, V] at the positions that predict supervised tokens."""

    lm: LanguageModel = field(repr=False)

    def __call__(self, model: nn.Module, batch: Batch) -> Tensor:
        ids, before, _ = batch
        # Only the math kernel supports forward-mode derivatives. Attention is causal, so the padding behind a record
        # cannot reach back into it, and no mask is needed.
        with sdpa_kernel(SDPBackend.MATH):
            hidden = self.lm.decoder(input_ids=ids, use_cache=False).last_hidden_state
        # Gathered before the output head: logits of prompts, over the whole vocabulary, would be most of the memory.
        logits: Tensor = self.lm.logits(hidden.gather(1, before[:, :, None].expand(-1, -1, hidden.shape[-1])))
        return logits
