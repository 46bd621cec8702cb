"""What a model says of the labels of a closed set, and where it puts the records."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from posttrain.select.scores.arrays import as_lists
from posttrain.select.scores.dropout import sub_network
from posttrain.select.scores.group import Asked, Group

if TYPE_CHECKING:
    from posttrain.models.language_model import LanguageModel

_AT_ONCE = 256
_TOLERANCE = 1e-3  # of what several passes are compared by, and differences are small


def label_group(labels: Sequence[str]) -> Group:
    """``log_probabilities`` [N, K] in nats, normalised over the labels, and ``embedding`` [N, D]."""

    def score(lm: LanguageModel, records: Sequence[Asked]) -> pa.Table:
        from posttrain.models.likelihood import label_scores

        found = label_scores(lm, [one.prompt for one in records], labels, embeddings=True)
        assert found.embeddings is not None
        return pa.table(
            {"log_probabilities": as_lists(found.log_probabilities), "embedding": as_lists(found.embeddings)}
        )

    return Group("labels", 1, {"labels": list(labels)}, score, _AT_ONCE)


def dropout_group(labels: Sequence[str], passes: int, share: float, seed: int) -> Group:
    """``log_probabilities`` [N, T * K] of T passes, each by a sub-network of its own (see `sub_network`)."""

    def score(lm: LanguageModel, records: Sequence[Asked]) -> pa.Table:
        from posttrain.models.likelihood import label_scores

        prompts = [one.prompt for one in records]
        found = []
        for number in range(passes):
            with sub_network(lm, share, seed, number):
                found.append(label_scores(lm, prompts, labels, tolerance=_TOLERANCE).log_probabilities)
        return pa.table({"log_probabilities": as_lists(np.concatenate(found, axis=1))})

    settings = {"labels": list(labels), "passes": passes, "share": share, "seed": seed}
    return Group("dropout", 1, settings, score, max(16, _AT_ONCE // passes))


def embedding_group() -> Group:
    """``embedding`` [N, D] alone: the mean of the hidden states over the input's own tokens."""

    def score(lm: LanguageModel, records: Sequence[Asked]) -> pa.Table:
        from posttrain.models.likelihood import embeddings

        return pa.table({"embedding": as_lists(embeddings(lm, [one.prompt for one in records]))})

    return Group("embeddings", 1, {}, score, _AT_ONCE)


def sentence_group() -> Group:
    """``embedding`` [N, D] of the input's words, by a sentence model in a language model's place."""

    def score(embedder: Any, records: Sequence[Asked]) -> pa.Table:
        texts = ["\n".join(turn["content"] for turn in one.prompt) for one in records]
        return pa.table({"embedding": as_lists(embedder.embed(texts))})

    return Group("sentences", 1, {}, score, _AT_ONCE)
