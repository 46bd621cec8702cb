"""Samples several answers to each prompt, and scores how much they agree."""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from posttrain.select.scores.context import ScoringBatch
from posttrain.select.scores.passes import ScoreGroup, ScoringInput
from posttrain.store.hashing import digest

if TYPE_CHECKING:
    from posttrain.models.language_model import LanguageModel

_CHUNK = 16
_BATCH_TOKENS = 4096  # of a batch's prompts and answers, padding included, as the key-value cache grows with them

SAMPLES_SCHEMA = pa.schema(
    [
        pa.field("answers", pa.list_(pa.string())),
        pa.field("log_probabilities", pa.list_(pa.float64())),  # nats, summed over an answer's tokens
        pa.field("tokens", pa.list_(pa.int64())),  # the stop token included
    ]
)

_WORD = re.compile(r"\w+")


def score_log_probability_variance(batch: ScoringBatch) -> list[float]:
    """Scores records by the variance of the sampled answers' log-probabilities."""
    return [float(np.var(logs, ddof=1)) for logs in sampled_table(batch)["log_probabilities"].to_pylist()]


def score_lexical_diversity(batch: ScoringBatch) -> list[float]:
    """Scores records by how few words their sampled answers share."""
    return [lexical_diversity(answers) for answers in sampled_table(batch)["answers"].to_pylist()]


def score_self_consistency(batch: ScoringBatch) -> list[float]:
    """Scores records by the share of sampled answers that are the most frequent one."""
    return [self_consistency(answers) for answers in sampled_table(batch)["answers"].to_pylist()]


def sampled_table(batch: ScoringBatch) -> pa.Table:
    """Returns the sampled answers of each record by `SAMPLES_SCHEMA`; sampled once for all scores that use them."""
    scoring = batch.scoring
    group = sample_group(scoring.config.samples, scoring.config.temperature, scoring.seed)
    return batch.share("samples", lambda: scoring.run(group, batch.inputs))


def sample_group(samples: int, temperature: float, seed: int) -> ScoreGroup:
    """Samples ``answers``, with their ``log_probabilities`` and numbers of ``tokens``: lists of ``samples`` entries."""

    def score(lm: LanguageModel, records: Sequence[ScoringInput]) -> pa.Table:
        from posttrain.models.chat import TokenizedExample
        from posttrain.models.likelihood import context_length, sequence_log_likelihoods

        sampled = sample_answers(lm, records, samples, temperature, seed)
        sequences = []
        for record, answers in zip(records, sampled, strict=True):
            before = lm.prompt_ids(record.prompt)
            supervised = [[False] * len(before) + [True] * len(tokens) for tokens in answers]
            sequences += [TokenizedExample(before + ids, on) for ids, on in zip(answers, supervised, strict=True)]
        sums, counts = sequence_log_likelihoods(lm, sequences, context_length(lm))
        cuts = range(0, len(sequences), samples)
        return pa.table(
            {
                "answers": [[_decode_answer(lm, ids) for ids in answers] for answers in sampled],
                "log_probabilities": [sums[cut : cut + samples].tolist() for cut in cuts],
                "tokens": [counts[cut : cut + samples].tolist() for cut in cuts],
            },
            schema=SAMPLES_SCHEMA,
        )

    settings = {"samples": samples, "temperature": temperature, "seed": seed}
    return ScoreGroup("samples", 1, settings, score, _CHUNK)


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


def _decode_answer(lm: LanguageModel, ids: list[int]) -> str:
    # The stop token counts in the answer's probability, but is no part of its text.
    tokens = ids[:-1] if ids[-1] in lm.chat.stop_ids else ids
    return str(lm.tokenizer.decode(tokens, skip_special_tokens=True)).strip()


def normalise_answer(answer: str) -> str:
    """Normalises an answer for comparison: NFC, case folded, runs of whitespace as one space, none around."""
    return " ".join(unicodedata.normalize("NFC", answer).casefold().split())


def self_consistency(answers: Sequence[str]) -> float:
    """Returns the share of the answers that agree with the most frequent one, between 1/S and 1.

    X. Wang et al., Self-Consistency Improves Chain of Thought Reasoning, ICLR 2023 (arXiv:2203.11171), section 2.

    Args:
        answers: S >= 1 answers, compared as `normalise_answer` returns them.
    """
    return max(Counter(map(normalise_answer, answers)).values()) / len(answers)


def lexical_diversity(answers: Sequence[str]) -> float:
    """Returns one minus the mean ROUGE-1 F1 over all pairs: 0 where all use the same words, 1 where none shares any.

    C.-Y. Lin, ROUGE, 2004 (W04-1013), for n = 1; one minus lexical similarity as L. Kuhn et al., ICLR 2023
    (arXiv:2302.09664) have it with ROUGE-L. Two answers without a word are alike.

    Args:
        answers: S >= 2 answers.
    """
    bags = [Counter(_WORD.findall(normalise_answer(answer))) for answer in answers]
    pairs = list(combinations(bags, 2))
    return 1.0 - sum(_rouge_1(first, second) for first, second in pairs) / len(pairs)


def _rouge_1(first: Counter[str], second: Counter[str]) -> float:
    total = first.total() + second.total()
    return 2 * (first & second).total() / total if total else 1.0
