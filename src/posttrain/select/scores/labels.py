"""Label probabilities and embeddings by the champion, and scores of disagreement: BALD and query by committee."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from posttrain.select.scores.context import ScoringBatch, ScoringContext
from posttrain.select.scores.passes import ScoreGroup, ScoringInput, ScoringModel, to_list_column, to_matrix
from posttrain.select.scores.uncertainty import Floats, bald, consensus_kl, vote_entropy

if TYPE_CHECKING:
    from posttrain.models.language_model import LanguageModel

log = logging.getLogger("posttrain")

_CHUNK = 256
_TOLERANCE = 1e-3  # of label log-probabilities: passes with dropout are compared by small differences


def score_bald(batch: ScoringBatch) -> Floats:
    """Scores records by the mutual information of label and weights."""
    return bald(_dropout_probabilities(batch))


def score_vote_entropy(batch: ScoringBatch) -> Floats:
    """Scores records by the entropy of the committee's votes."""
    return vote_entropy(_committee_probabilities(batch))


def score_consensus_kl(batch: ScoringBatch) -> Floats:
    """Scores records by the committee's mean divergence from its mean."""
    return consensus_kl(_committee_probabilities(batch))


def _dropout_probabilities(batch: ScoringBatch) -> Floats:
    """Computes label probabilities by T sub-networks of the champion: [T, N, K]."""

    def compute() -> Floats:
        scoring, labels = batch.scoring, batch.scoring.labels
        passes = scoring.config.passes
        group = dropout_group(labels, passes, scoring.config.dropout, scoring.seed)
        logs = to_matrix(scoring.run(group, batch.inputs), "log_probabilities").astype(np.float64)
        return np.exp(logs).reshape(len(batch), passes, len(labels)).swapaxes(0, 1)

    return batch.share("dropout", compute)


def _committee_probabilities(batch: ScoringBatch) -> Floats:
    """Computes label probabilities by the latest champions, or by sub-networks of a single one: [T, N, K]."""

    def compute() -> Floats:
        scoring = batch.scoring
        members = [*scoring.committee, scoring.model][-scoring.config.committee :]
        if len(members) < 2:
            log.info("  one trained champion is no committee: its passes with dropout stand in")
            return _dropout_probabilities(batch)
        return np.exp(np.stack([label_log_probabilities(scoring, member, batch.inputs) for member in members]))

    return batch.share("committee", compute)


def label_log_probabilities(scoring: ScoringContext, model: ScoringModel, records: Sequence[ScoringInput]) -> Floats:
    """Returns a model's log-probabilities of the labels, float64 [N, K], and unloads it unless it is the champion."""
    table = scoring.run(label_group(scoring.labels), records, model)
    scoring.unload(model)
    return to_matrix(table, "log_probabilities").astype(np.float64)


def label_group(labels: Sequence[str]) -> ScoreGroup:
    """Computes ``log_probabilities`` [N, K] in nats, normalised over the labels, and ``embedding`` [N, D]."""

    def score(lm: LanguageModel, records: Sequence[ScoringInput]) -> pa.Table:
        from posttrain.models.likelihood import label_scores

        scores = label_scores(lm, [record.prompt for record in records], labels, embeddings=True)
        assert scores.embeddings is not None
        return pa.table(
            {
                "log_probabilities": to_list_column(scores.log_probabilities),
                "embedding": to_list_column(scores.embeddings),
            }
        )

    return ScoreGroup("labels", 1, {"labels": list(labels)}, score, _CHUNK)


def dropout_group(labels: Sequence[str], passes: int, share: float, seed: int) -> ScoreGroup:
    """Computes ``log_probabilities`` [N, T * K] of T passes, each by a sub-network of its own (see `dropout_mask`)."""

    def score(lm: LanguageModel, records: Sequence[ScoringInput]) -> pa.Table:
        from posttrain.models.likelihood import label_scores
        from posttrain.select.scores.model_passes import dropout_mask

        prompts = [record.prompt for record in records]
        logs = []
        for number in range(passes):
            with dropout_mask(lm, share, seed, number):
                logs.append(label_scores(lm, prompts, labels, tolerance=_TOLERANCE).log_probabilities)
        return pa.table({"log_probabilities": to_list_column(np.concatenate(logs, axis=1))})

    settings = {"labels": list(labels), "passes": passes, "share": share, "seed": seed}
    # Smaller chunks for more passes, so that a killed run loses about as much work as any other.
    return ScoreGroup("dropout", 1, settings, score, max(16, _CHUNK // passes))


def embedding_group() -> ScoreGroup:
    """Computes ``embedding`` [N, D] alone: the mean of the hidden states over the input's own tokens."""

    def score(lm: LanguageModel, records: Sequence[ScoringInput]) -> pa.Table:
        from posttrain.models.likelihood import prompt_embeddings

        return pa.table({"embedding": to_list_column(prompt_embeddings(lm, [record.prompt for record in records]))})

    return ScoreGroup("embeddings", 1, {}, score, _CHUNK)


def sentence_group() -> ScoreGroup:
    """Computes ``embedding`` [N, D] of the input's text, by a sentence model in place of a language model."""

    def score(embedder: Any, records: Sequence[ScoringInput]) -> pa.Table:
        texts = ["\n".join(turn["content"] for turn in record.prompt) for record in records]
        return pa.table({"embedding": to_list_column(embedder.embed(texts))})

    return ScoreGroup("sentences", 1, {}, score, _CHUNK)
