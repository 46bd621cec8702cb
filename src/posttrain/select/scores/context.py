"""Everything that computing scores needs: the models, the labels, the settings, the cache, and the records."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import pyarrow as pa

from posttrain.models.task import Turns
from posttrain.select.scores.config import ScoringConfig
from posttrain.select.scores.passes import ScoreCache, ScoreGroup, ScoringInput, ScoringModel, cached_scores

Result = TypeVar("Result")


@dataclass(frozen=True)
class ScoringContext:
    """The models that score records, and their settings.

    Attributes:
        model: the champion.
        labels: the closed label set; empty for free text.
        config: the config section ``select.scoring``.
        cache: cache of finished scores.
        seed: seed of masks and sampled answers; the same in every round.
        committee: earlier champions, oldest first, the champion not among them.
        past_champions: the champions of the rounds so far, oldest first.
        judge: the model that judges entailment; None for the champion.
        sentences: a sentence model that embeds the records; None for the champion.
        temperature: divides the champion's log-probabilities, of labels or of its answer per token.
    """

    model: ScoringModel
    labels: Sequence[str] = ()
    config: ScoringConfig = field(default_factory=ScoringConfig)
    cache: ScoreCache = field(default_factory=ScoreCache)
    seed: int = 0
    committee: Sequence[ScoringModel] = ()
    past_champions: Sequence[ScoringModel] = ()
    judge: ScoringModel | None = None
    sentences: ScoringModel | None = None
    temperature: float = 1.0

    def run(self, group: ScoreGroup, records: Sequence[ScoringInput], model: ScoringModel | None = None) -> pa.Table:
        """Scores records by the champion or another model: one row a record, with the group's columns."""
        return cached_scores(group, model or self.model, records, self.cache)

    def unload(self, model: ScoringModel) -> None:
        """Frees the memory of a model, unless it is the champion, which the next score needs again."""
        if model.id != self.model.id:
            vars(model).pop("lm", None)


class ScoringBatch:
    """Records to score, with intermediate results that several scores share.

    Attributes:
        scoring: the models and their settings.
        inputs: N prompts without answers.
        inputs_with_answers: the same with one answer each: the champion's, or the right one of labelled records.
        base: the champion's table of base measures: ``predicted`` [N], for free text also ``log_probability`` [N];
            None for labelled records.
    """

    def __init__(
        self, scoring: ScoringContext, prompts: Sequence[Turns], answers: Sequence[str], base: pa.Table | None = None
    ) -> None:
        self.scoring, self.base = scoring, base
        self.inputs = [ScoringInput(prompt) for prompt in prompts]
        pairs = zip(prompts, answers, strict=True)
        self.inputs_with_answers = [ScoringInput(prompt, (answer,)) for prompt, answer in pairs]
        self._shared: dict[str, Any] = {}

    def __len__(self) -> int:
        return len(self.inputs)

    def share(self, name: str, compute: Callable[[], Result]) -> Result:
        """Returns the result of ``compute`` under a name, computed once for all scores that use it."""
        if name not in self._shared:
            self._shared[name] = compute()
        result: Result = self._shared[name]
        return result
