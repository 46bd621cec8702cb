"""Causal language models with an adapter, as models whose influence can be computed."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from posttrain.attribution.influence import Batch, InfluenceModel
from posttrain.models.chat import TokenizedExample
from posttrain.models.language_model import LanguageModel
from posttrain.models.likelihood import context_length
from posttrain.models.loading import first_line
from posttrain.models.task import Turns
from posttrain.store.errors import UserError

IGNORE_INDEX = -100
"""The target of positions that do not count, as in torch's ``cross_entropy``."""


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


def encode_record(lm: LanguageModel, prompt: Turns, answer: str) -> TokenizedExample:
    """Tokenizes a test record for `influence_model`: the rendered prompt, and an answer with its stop token.

    Args:
        lm: the model.
        prompt: the conversation up to the answer.
        answer: the supervised text.

    Raises:
        UserError: it is longer than the model's context.
    """
    whole = lm.encode(prompt, answer)
    if len(whole.ids) > context_length(lm):
        raise UserError(
            f"a record of {len(whole.ids)} tokens is longer than the model's {context_length(lm)}", where="influence"
        )
    prompt_length = len(whole.ids) - len(lm.answer_ids(answer))
    return TokenizedExample(whole.ids, [position >= prompt_length for position in range(len(whole.ids))])


def influence_model(lm: LanguageModel) -> InfluenceModel:
    """Wraps a causal language model; its records are those of `encode_record`, its losses in nats.

    Only the parameters that require a gradient count: train an adapter, or load one with `load_adapter`. The loss of a
    record is the sum of its supervised tokens' negative log-probabilities. The base weights should be float32: in
    bfloat16 gradients of single records have 8 bits.
    """

    def logits(batch: Batch) -> Tensor:
        """Computes float32 logits [B, S, V] at the positions that predict supervised tokens."""
        ids, before, _ = batch
        # Attention is causal, so the padding behind a record cannot reach back into it, and no mask is needed.
        hidden = lm.decoder(input_ids=ids, use_cache=False).last_hidden_state
        # Gathered before the output head: logits of prompts, over the whole vocabulary, would be most of the memory.
        return lm.logits(hidden.gather(1, before[:, :, None].expand(-1, -1, hidden.shape[-1])))

    return InfluenceModel(lm.model, logits, CrossEntropy(), _PaddedCollator(lm.tokenizer.pad_token_id or 0))


class CrossEntropy:
    """Softmax cross-entropy of logits [B, K] or [B, T, K] and classes [B] or [B, T], which end the batch, in nats.

    A record's positions are summed; positions whose target is `IGNORE_INDEX` do not count.
    """

    def __call__(self, outputs: Tensor, batch: Batch) -> Tensor:
        targets = batch[-1]
        chosen = outputs.log_softmax(-1).gather(-1, targets.clamp(min=0).unsqueeze(-1)).squeeze(-1)
        losses = torch.where(targets == IGNORE_INDEX, torch.zeros_like(chosen), -chosen)
        return losses.flatten(1).sum(1) if losses.dim() > 1 else losses

    def roots(self, outputs: Tensor, batch: Batch, generator: torch.Generator) -> Tensor:
        """Draws one root as `posttrain.attribution.influence.Loss` specifies.

        The Hessian is diag(p) - p p'. It is the average of the outer product of e_y - p, with a class y drawn from p
        (R. Grosse et al. 2023, arXiv:2308.03296, section 2.2: the model's own labels, not those of the records).
        """
        p = outputs.softmax(-1)
        classes = torch.multinomial(p.flatten(0, -2), 1, generator=generator).view(p.shape[:-1])
        counted = (batch[-1] != IGNORE_INDEX).to(p.dtype).unsqueeze(-1)
        residuals: Tensor = (torch.nn.functional.one_hot(classes, p.shape[-1]).to(p.dtype) - p) * counted
        return residuals[None]


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
