"""Several answers to each prompt, drawn from the model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pyarrow as pa
import torch
from torch import Tensor

from posttrain.select.scores.group import Asked, Group
from posttrain.store.hashing import digest

if TYPE_CHECKING:
    from posttrain.models.language_model import LanguageModel

_AT_ONCE = 16
_BATCH_TOKENS = 4096

SAMPLES = pa.schema(
    [
        pa.field("answers", pa.list_(pa.string())),
        pa.field("log_probabilities", pa.list_(pa.float64())),  # nats, of all of an answer's tokens
        pa.field("tokens", pa.list_(pa.int64())),  # the stop token among them
    ]
)


def sample_group(samples: int, temperature: float, seed: int) -> Group:
    """``answers``, their ``log_probabilities`` and numbers of ``tokens``: lists of as many as are sampled."""

    def score(lm: LanguageModel, records: Sequence[Asked]) -> pa.Table:
        from posttrain.models.chat import Encoded
        from posttrain.models.text_likelihood import context, log_likelihoods

        drawn = sample_answers(lm, records, samples, temperature, seed)
        sequences = []
        for one, answers in zip(records, drawn, strict=True):
            before = lm.prompt_ids(one.prompt)
            supervised = [[False] * len(before) + [True] * len(tokens) for tokens in answers]
            sequences += [Encoded(before + ids, on) for ids, on in zip(answers, supervised, strict=True)]
        sums, counts = log_likelihoods(lm, sequences, context(lm))
        cuts = range(0, len(sequences), samples)
        return pa.table(
            {
                "answers": [[_text(lm, ids) for ids in answers] for answers in drawn],
                "log_probabilities": [sums[cut : cut + samples].tolist() for cut in cuts],
                "tokens": [counts[cut : cut + samples].tolist() for cut in cuts],
            },
            schema=SAMPLES,
        )

    settings = {"samples": samples, "temperature": temperature, "seed": seed}
    return Group("samples", 1, settings, score, _AT_ONCE)


@torch.inference_mode()
def sample_answers(
    lm: LanguageModel, records: Sequence[Asked], samples: int, temperature: float, seed: int
) -> list[list[list[int]]]:
    """Token ids of ``samples`` answers to each record, up to and with the stop token; all of a prompt in one batch.

    Each answer has random numbers of its own, by record and number: it does not hang on those that are drawn beside it.

    Args:
        temperature: by which logits are divided; nothing is cut off the distribution.
        seed: of the random numbers.
    """
    from transformers import LogitsProcessorList

    ids = [lm.prompt_ids(one.prompt) for one in records]
    limit = lm.task.max_new_tokens
    found: list[list[list[int]]] = [[] for _ in records]
    order = sorted(range(len(ids)), key=lambda row: (len(ids[row]), row))
    filler = lm.tokenizer.pad_token_id or 0
    while order:
        taken = 1
        while taken < len(order) and (taken + 1) * samples * (len(ids[order[taken]]) + limit) <= _BATCH_TOKENS:
            taken += 1
        rows, order = order[:taken], order[taken:]
        width = len(ids[rows[-1]])
        repeated = [row for row in rows for _ in range(samples)]
        padding = [width - len(ids[row]) for row in repeated]
        tokens = [[filler] * more + ids[row] for more, row in zip(padding, repeated, strict=True)]
        mask = [[0] * more + [1] * (width - more) for more in padding]
        seeds = [int(digest([seed, records[row].key, number])[:15], 16) for row in rows for number in range(samples)]
        output = lm.model.generate(
            input_ids=torch.tensor(tokens, device=lm.device),
            attention_mask=torch.tensor(mask, device=lm.device),
            max_new_tokens=limit,
            eos_token_id=sorted(lm.chat.stop_ids),
            pad_token_id=filler,
            logits_processor=LogitsProcessorList([_Gumbel(seeds, temperature)]),
            do_sample=False,
            num_beams=1,
            repetition_penalty=1.0,
            no_repeat_ngram_size=0,
        )
        for row, answer in zip(repeated, output[:, width:].tolist(), strict=True):
            found[row].append(_up_to_stop(lm, answer))
    return found


@dataclass
class _Gumbel:
    """Makes the greatest logit a draw from the softmax: noise is added whose maximum is distributed so.

    E. J. Gumbel, 1954; C. Maddison, D. Tarlow, T. Minka, A* Sampling, NeurIPS 2014, section 2.
    """

    seeds: Sequence[int]
    temperature: float

    def __post_init__(self) -> None:
        self._generators = [torch.Generator().manual_seed(seed) for seed in self.seeds]

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        noise = torch.empty(scores.shape, dtype=torch.float32)
        for row, generator in zip(noise, self._generators, strict=True):
            row.exponential_(generator=generator)
        return scores.float() / self.temperature - noise.log_().to(scores.device)


def _up_to_stop(lm: LanguageModel, ids: list[int]) -> list[int]:
    end = next((place for place, token in enumerate(ids) if token in lm.chat.stop_ids), len(ids))
    return ids[: end + 1]


def _text(lm: LanguageModel, ids: list[int]) -> str:
    words = ids[:-1] if ids[-1] in lm.chat.stop_ids else ids
    return str(lm.tokenizer.decode(words, skip_special_tokens=True)).strip()
