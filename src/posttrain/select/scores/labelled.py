"""Scores of labelled records: loss, gradient norm, instruction difficulty and forgetting events."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from posttrain.select.scores.answers import answer_group
from posttrain.select.scores.context import ScoringBatch
from posttrain.select.scores.labels import label_log_probabilities
from posttrain.select.scores.passes import ScoreGroup, ScoringInput, ScoringModel
from posttrain.select.scores.sampled_answers import normalise_answer
from posttrain.select.scores.uncertainty import Floats

if TYPE_CHECKING:
    from posttrain.models.language_model import LanguageModel

_CHUNK = 64


def score_loss(batch: ScoringBatch) -> Floats:
    """Scores records by the loss of the right answer, nats a token."""
    return _loss_column(batch, "loss")


def score_gradient_norm(batch: ScoringBatch) -> Floats:
    """Scores records by the norm of that loss's gradient in the output layer."""
    return _loss_column(batch, "gradient_norm")


def score_instruction_difficulty(batch: ScoringBatch) -> Floats:
    """Scores records by instruction-following difficulty."""
    table = batch.scoring.run(instruction_difficulty_group(), batch.inputs_with_answers)
    values: Floats = table["instruction_difficulty"].to_numpy()
    return values


def score_forgetting_events(batch: ScoringBatch) -> Floats:
    """Scores records by how often successive models of the loop forget their answers."""
    models = batch.scoring.past_champions or [batch.scoring.model]
    return forgetting_events([_answers_correctly(batch, model) for model in models])


def _loss_column(batch: ScoringBatch, name: str) -> Floats:
    # One backward pass gives both columns.
    table = batch.share("loss", lambda: batch.scoring.run(loss_group(), batch.inputs_with_answers))
    values: Floats = table[name].to_numpy()
    return values


def _answers_correctly(batch: ScoringBatch, model: ScoringModel) -> npt.NDArray[np.bool_]:
    """Returns for each record whether a model's answer is the right one: bool [N]."""
    scoring, expected = batch.scoring, [record.answers[0] for record in batch.inputs_with_answers]
    if scoring.labels:
        best = label_log_probabilities(scoring, model, batch.inputs).argmax(axis=1)
        return np.array([scoring.labels[row] == answer for row, answer in zip(best, expected, strict=True)], bool)
    predicted = scoring.run(answer_group(), batch.inputs, model)["predicted"].to_pylist()
    scoring.unload(model)
    pairs = zip(predicted, expected, strict=True)
    return np.array([normalise_answer(answer) == normalise_answer(right) for answer, right in pairs], bool)


def loss_group() -> ScoreGroup:
    """Computes ``loss``, nats a token of the right answer, and ``gradient_norm`` of it in the output layer."""

    def score(lm: LanguageModel, records: Sequence[ScoringInput]) -> pa.Table:
        from posttrain.select.scores.model_passes import encode_answer, loss_and_gradient_norm

        pairs = [loss_and_gradient_norm(lm, encode_answer(lm, record)) for record in records]
        return pa.table(
            {
                "loss": pa.array([loss for loss, _ in pairs], pa.float64()),
                "gradient_norm": pa.array([norm for _, norm in pairs], pa.float64()),
            }
        )

    return ScoreGroup("learning", 1, {}, score, _CHUNK)


def instruction_difficulty_group() -> ScoreGroup:
    """Computes ``instruction_difficulty``: perplexity of the right answer after its prompt, over that without it."""

    def score(lm: LanguageModel, records: Sequence[ScoringInput]) -> pa.Table:
        from posttrain.models.likelihood import instruction_following_difficulty

        prompts, answers = [record.prompt for record in records], [record.answers[0] for record in records]
        difficulties = instruction_following_difficulty(lm, prompts, answers)
        return pa.table({"instruction_difficulty": pa.array(difficulties, pa.float64())})

    return ScoreGroup("instruction_difficulty", 1, {}, score, _CHUNK)


def forgetting_events(correct: npt.ArrayLike) -> Floats:
    """Counts how often a record is right for one model and wrong for the next; infinite where it was never right.

    M. Toneva et al., An Empirical Study of Example Forgetting, ICLR 2019 (arXiv:1812.05159), section 3 and, for the
    records that are never learnt, algorithm 1. Here the successive models are those of the loop's rounds, not those of
    one training's steps.

    Args:
        correct: bool [R, N], whether each of R successive models answers each of N records rightly.

    Returns:
        float64 [N].
    """
    right = np.asarray(correct, dtype=bool)
    if right.ndim != 2:
        raise ValueError(f"correct must be [R, N], got shape {right.shape}")
    events = (right[:-1] & ~right[1:]).sum(axis=0).astype(np.float64)
    counts: Floats = np.where(right.any(axis=0), events, np.inf)
    return counts
