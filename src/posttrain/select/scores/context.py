"""Everything that computing scores needs: the models, the labels, the settings, the cache, and the records."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import pyarrow as pa

from posttrain.models.task import Turns
from posttrain.select.scores.passes import ScoreCache, ScoreGroup, ScoringInput, ScoringModel, cached_scores


@dataclass(frozen=True)
class ScoringContext:
    """The models that score records, and their settings.

    Attributes:
        model: the champion.
        labels: the closed label set; empty for free text.
        cache: cache of finished scores.
        seed: draws the records that calibration uses; the same in every round.
        sentences: a sentence model that embeds the records; None for the champion.
        temperature: divides the champion's log-probabilities, of labels or of its answer per token.
    """

    model: ScoringModel
    labels: Sequence[str] = ()
    cache: ScoreCache = field(default_factory=ScoreCache)
    seed: int = 0
    sentences: ScoringModel | None = None
    temperature: float = 1.0

    def run(self, group: ScoreGroup, records: Sequence[ScoringInput], model: ScoringModel | None = None) -> pa.Table:
        """Scores records by the champion or another model: one row per record, with the group's columns."""
        return cached_scores(group, model or self.model, records, self.cache)


class ScoringBatch:
    """Records to score.

    Attributes:
        scoring: the models and their settings.
        inputs: N prompts without answers.
        inputs_with_answers: the same with one answer each: the champion's, or the right one of labelled records.
    """

    def __init__(self, scoring: ScoringContext, prompts: Sequence[Turns], answers: Sequence[str]) -> None:
        self.scoring = scoring
        self.inputs = [ScoringInput(prompt) for prompt in prompts]
        pairs = zip(prompts, answers, strict=True)
        self.inputs_with_answers = [ScoringInput(prompt, (answer,)) for prompt, answer in pairs]

    def __len__(self) -> int:
        return len(self.inputs)
