"""The computations that scores need a loaded model for: token entropies, gradients, dropout masks, sampled answers.

The modules that describe the scores import this one only when a model has to score something: reading finished scores
needs no torch, whose import takes longer than the rest of a verb.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from posttrain.models.chat import TokenizedExample
from posttrain.select.scores.passes import ScoringInput
from posttrain.store.errors import UserError
from posttrain.store.hashing import digest

if TYPE_CHECKING:
    from posttrain.models.language_model import LanguageModel

_BATCH_SIZE = 8  # sequences of a forward pass
_LOGITS_BLOCK = 256  # tokens, each with logits of the whole vocabulary
_BATCH_TOKENS = 4096  # of a batch's prompts and answers, padding included, as the key-value cache grows with them


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


def loss_and_gradient_norm(lm: LanguageModel, sequence: TokenizedExample) -> tuple[float, float]:
    """Computes the mean loss of the supervised tokens, in nats, and its gradient's norm in the output layer.

    GraNd (M. Paul, G. Dziugaite, S. Ganguli, NeurIPS 2021) of the last layer, as J. Ash et al. (BADGE, ICLR 2020) take
    gradients.
    """
    ids = torch.tensor([sequence.ids], device=lm.device)
    at = torch.tensor([index for index, on in enumerate(sequence.supervised) if on and index > 0], device=lm.device)
    with torch.no_grad():
        states = lm.decoder(input_ids=ids, use_cache=False).last_hidden_state[0, at - 1]
    outputs: list[torch.Tensor] = []
    # A hook catches the layer's own output, before the scales and caps that some families apply to it.
    handle = lm.model.get_output_embeddings().register_forward_hook(lambda *call: outputs.append(call[2]))
    try:
        with torch.enable_grad():
            logits = lm.logits(states.detach().requires_grad_())
            loss = torch.nn.functional.cross_entropy(logits, ids[0, at])
            (slope,) = torch.autograd.grad(loss, outputs[0])
    finally:
        handle.remove()
    slope, states = slope.double(), states.double()
    # The gradient sum_t d_t h_t^T has the size of the output layer and is never formed: with d_t the loss's gradient in
    # the layer's output at token t and h_t its input, the squared norm is sum_ts (d_t . d_s)(h_t . h_s).
    squared = ((slope @ slope.T) * (states @ states.T)).sum()
    return float(loss.detach().double()), float(squared.clamp(min=0).sqrt())


@contextmanager
def dropout_mask(lm: LanguageModel, share: float, seed: int, number: int) -> Iterator[None]:
    """Drops some inputs of every linear layer below the output head, and scales up the others, while active.

    Monte Carlo dropout (Y. Gal and Z. Ghahramani, ICML 2016) with one mask a pass instead of one a record and token,
    "consistent" dropout (A. Kirsch, J. van Amersfoort, Y. Gal, BatchBALD, NeurIPS 2019, section 4.1).

    Args:
        lm: the model.
        share: share of the inputs to drop.
        seed: decides the masks, together with ``number``.
        number: number of the pass.

    Raises:
        UserError: the model has no linear layer.
    """
    from transformers.pytorch_utils import Conv1D

    layers = [(name, layer) for name, layer in lm.decoder.named_modules() if isinstance(layer, nn.Linear | Conv1D)]
    if not layers:
        raise UserError("the model has no linear layer to drop inputs of", where="select.scores", fix="leave bald out")
    handles = []
    try:
        for name, layer in layers:
            size = layer.in_features if isinstance(layer, nn.Linear) else layer.nx
            # One mask for all records: a record's score must not depend on the records in its batch.
            generator = torch.Generator().manual_seed(int(digest([seed, number, name])[:15], 16))
            mask = (torch.rand(size, generator=generator) >= share).to(layer.weight) / (1 - share)
            handles.append(layer.register_forward_pre_hook(_multiply_inputs(mask)))
        yield
    finally:
        for handle in handles:
            handle.remove()


def _multiply_inputs(mask: Tensor) -> Any:
    def hook(module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (inputs[0] * mask, *inputs[1:])

    return hook


@torch.inference_mode()
def sample_answers(
    lm: LanguageModel, records: Sequence[ScoringInput], samples: int, temperature: float, seed: int
) -> list[list[list[int]]]:
    """Samples token ids of ``samples`` answers to each record, up to and with the stop token.

    Args:
        lm: the model.
        records: prompts.
        samples: number of answers to each.
        temperature: divides the logits; the distribution is not truncated.
        seed: seed of the random numbers.
    """
    from transformers import LogitsProcessorList

    ids = [lm.prompt_ids(record.prompt) for record in records]
    limit = lm.task.max_new_tokens
    answers: list[list[list[int]]] = [[] for _ in records]
    order = sorted(range(len(ids)), key=lambda row: (len(ids[row]), row))
    filler = lm.tokenizer.pad_token_id or 0
    while order:
        size = 1
        # All samples of a prompt in one batch, and prompts of like length together, up to the batch's tokens.
        while size < len(order) and (size + 1) * samples * (len(ids[order[size]]) + limit) <= _BATCH_TOKENS:
            size += 1
        rows, order = order[:size], order[size:]
        width = len(ids[rows[-1]])
        repeated = [row for row in rows for _ in range(samples)]
        padding = [width - len(ids[row]) for row in repeated]
        tokens = [[filler] * more + ids[row] for more, row in zip(padding, repeated, strict=True)]
        mask = [[0] * more + [1] * (width - more) for more in padding]
        # A seed an answer, by record and number: an answer must not depend on those sampled in the same batch.
        seeds = [int(digest([seed, records[row].key, number])[:15], 16) for row in rows for number in range(samples)]
        # Settings of the model's own generation config are overridden: any of them would change the distribution.
        output = lm.model.generate(
            input_ids=torch.tensor(tokens, device=lm.device),
            attention_mask=torch.tensor(mask, device=lm.device),
            max_new_tokens=limit,
            eos_token_id=sorted(lm.chat.stop_ids),
            pad_token_id=filler,
            logits_processor=LogitsProcessorList([_GumbelSampler(seeds, temperature)]),
            do_sample=False,
            num_beams=1,
            repetition_penalty=1.0,
            no_repeat_ngram_size=0,
        )
        for row, answer in zip(repeated, output[:, width:].tolist(), strict=True):
            answers[row].append(_truncate_at_stop(lm, answer))
    return answers


@dataclass
class _GumbelSampler:
    """Adds Gumbel noise to logits, so that the greatest one is a draw from the softmax.

    E. J. Gumbel, 1954; C. Maddison, D. Tarlow, T. Minka, A* Sampling, NeurIPS 2014, section 2.
    """

    seeds: Sequence[int]
    temperature: float

    def __post_init__(self) -> None:
        self._generators = [torch.Generator().manual_seed(seed) for seed in self.seeds]

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        # Drawn on the CPU: its generators give the same numbers on every machine, those of a GPU do not.
        noise = torch.empty(scores.shape, dtype=torch.float32)
        for row, generator in zip(noise, self._generators, strict=True):
            row.exponential_(generator=generator)
        # -ln of an exponential draw is a Gumbel draw.
        return scores.float() / self.temperature - noise.log_().to(scores.device)


def _truncate_at_stop(lm: LanguageModel, ids: list[int]) -> list[int]:
    end = next((index for index, token in enumerate(ids) if token in lm.chat.stop_ids), len(ids))
    return ids[: end + 1]
