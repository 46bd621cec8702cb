"""Samples several answers to each prompt, and scores how much they agree."""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Sequence
from itertools import combinations
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from posttrain.select.scores.context import ScoringBatch
from posttrain.select.scores.passes import ScoreGroup, ScoringInput

if TYPE_CHECKING:
    from posttrain.models.language_model import LanguageModel

_CHUNK = 16

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
        from posttrain.select.scores.model_passes import sample_answers

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
