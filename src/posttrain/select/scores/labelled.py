"""Scores of labelled records: loss and instruction-following difficulty."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import pyarrow as pa

from posttrain.select.scores.answers import likelihood_group, surprisal
from posttrain.select.scores.context import ScoringBatch
from posttrain.select.scores.passes import ScoreGroup, ScoringInput
from posttrain.select.scores.uncertainty import Floats

if TYPE_CHECKING:
    from posttrain.models.language_model import LanguageModel

_CHUNK = 64


def score_loss(batch: ScoringBatch) -> Floats:
    """Scores records by the loss of the right answer, nats a token."""
    return surprisal(batch.scoring.run(likelihood_group(), batch.inputs_with_answers))


def score_instruction_difficulty(batch: ScoringBatch) -> Floats:
    """Scores records by instruction-following difficulty."""
    table = batch.scoring.run(instruction_difficulty_group(), batch.inputs_with_answers)
    values: Floats = table["instruction_difficulty"].to_numpy()
    return values


def instruction_difficulty_group() -> ScoreGroup:
    """Computes ``instruction_difficulty``: perplexity of the right answer after its prompt, over that without it."""

    def score(lm: LanguageModel, records: Sequence[ScoringInput]) -> pa.Table:
        from posttrain.models.likelihood import instruction_following_difficulty

        prompts, answers = [record.prompt for record in records], [record.answers[0] for record in records]
        difficulties = instruction_following_difficulty(lm, prompts, answers)
        return pa.table({"instruction_difficulty": pa.array(difficulties, pa.float64())})

    return ScoreGroup("instruction_difficulty", 1, {}, score, _CHUNK)
