"""Label probabilities and embeddings by the champion, and label probabilities by Monte Carlo dropout."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor, nn

from posttrain.select.scores.passes import ScoreGroup, ScoringInput, to_list_column
from posttrain.store.errors import UserError
from posttrain.store.hashing import digest

if TYPE_CHECKING:
    from posttrain.models.language_model import LanguageModel

_CHUNK = 256

_TOLERANCE = 1e-3  # of what several passes are compared by, and differences are small


def label_group(labels: Sequence[str]) -> ScoreGroup:
    """``log_probabilities`` [N, K] in nats, normalised over the labels, and ``embedding`` [N, D]."""

    def score(lm: LanguageModel, records: Sequence[ScoringInput]) -> pa.Table:
        from posttrain.models.likelihood import label_scores

        found = label_scores(lm, [one.prompt for one in records], labels, embeddings=True)
        assert found.embeddings is not None
        return pa.table(
            {
                "log_probabilities": to_list_column(found.log_probabilities),
                "embedding": to_list_column(found.embeddings),
            }
        )

    return ScoreGroup("labels", 1, {"labels": list(labels)}, score, _CHUNK)


def dropout_group(labels: Sequence[str], passes: int, share: float, seed: int) -> ScoreGroup:
    """``log_probabilities`` [N, T * K] of T passes, each by a sub-network of its own (see `dropout_mask`)."""

    def score(lm: LanguageModel, records: Sequence[ScoringInput]) -> pa.Table:
        from posttrain.models.likelihood import label_scores

        prompts = [one.prompt for one in records]
        found = []
        for number in range(passes):
            with dropout_mask(lm, share, seed, number):
                found.append(label_scores(lm, prompts, labels, tolerance=_TOLERANCE).log_probabilities)
        return pa.table({"log_probabilities": to_list_column(np.concatenate(found, axis=1))})

    settings = {"labels": list(labels), "passes": passes, "share": share, "seed": seed}
    return ScoreGroup("dropout", 1, settings, score, max(16, _CHUNK // passes))


def embedding_group() -> ScoreGroup:
    """``embedding`` [N, D] alone: the mean of the hidden states over the input's own tokens."""

    def score(lm: LanguageModel, records: Sequence[ScoringInput]) -> pa.Table:
        from posttrain.models.likelihood import prompt_embeddings

        return pa.table({"embedding": to_list_column(prompt_embeddings(lm, [one.prompt for one in records]))})

    return ScoreGroup("embeddings", 1, {}, score, _CHUNK)


def sentence_group() -> ScoreGroup:
    """``embedding`` [N, D] of the input's words, by a sentence model in a language model's place."""

    def score(embedder: Any, records: Sequence[ScoringInput]) -> pa.Table:
        texts = ["\n".join(turn["content"] for turn in one.prompt) for one in records]
        return pa.table({"embedding": to_list_column(embedder.embed(texts))})

    return ScoreGroup("sentences", 1, {}, score, _CHUNK)


@contextmanager
def dropout_mask(lm: LanguageModel, share: float, seed: int, number: int) -> Iterator[None]:
    """Leave out some inputs of every linear layer below the output head for a while, and scale up the others.

    Monte Carlo dropout (Y. Gal and Z. Ghahramani, ICML 2016) with one mask a pass instead of one a record and token,
    "consistent" dropout (A. Kirsch, J. van Amersfoort, Y. Gal, BatchBALD, NeurIPS 2019, section 4.1). So a record's
    score hangs on the record alone, and not on those that it was read with.

    Args:
        share: of the inputs that are left out.
        seed: with ``number``, which pass it is, it decides the masks.

    Raises:
        UserError: the model has no linear layer.
    """
    from transformers.pytorch_utils import Conv1D

    layers = [(name, one) for name, one in lm.decoder.named_modules() if isinstance(one, nn.Linear | Conv1D)]
    if not layers:
        raise UserError("the model has no linear layer to drop inputs of", where="select.scores", fix="leave bald out")
    handles = []
    try:
        for name, layer in layers:
            size = layer.in_features if isinstance(layer, nn.Linear) else layer.nx
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
