"""Groups of scores that the champion or a sentence model computes: label probabilities and embeddings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from posttrain.select.scores.passes import ScoreGroup, ScoringInput, to_list_column

if TYPE_CHECKING:
    from posttrain.models.language_model import LanguageModel

_CHUNK = 256


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
