"""Everything that computing scores needs: the models, the labels, the cache; and the columns of a score table."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from posttrain.models.task import Turns
from posttrain.select.scores import sampled_answers, semantic_entropy, uncertainty
from posttrain.select.scores.answers import answer_group, perplexity_group, token_entropy_group, verbalised_group
from posttrain.select.scores.config import ScoringConfig
from posttrain.select.scores.labelled import forgetting_events, instruction_difficulty_group, loss_group
from posttrain.select.scores.labels import dropout_group, embedding_group, label_group, sentence_group
from posttrain.select.scores.passes import ScoreCache, ScoreGroup, ScoringInput, ScoringModel, cached_scores, to_matrix
from posttrain.select.scores.sampled_answers import sample_group
from posttrain.select.scores.semantic_entropy import embedding_cluster_group, entailment_cluster_group

log = logging.getLogger("posttrain")

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class ScoringContext:
    """Who scores, and how.

    Attributes:
        model: the champion.
        labels: the closed label set; empty for free text.
        config: the config section ``select.scoring``.
        cache: of scores.
        seed: of masks and sampled answers; the same in every round.
        committee: earlier champions, oldest first, the champion not among them.
        line: the models of the rounds so far, oldest first.
        judge: of entailment; the champion where there is none.
        sentences: a sentence model that says which records are alike; the champion where there is none.
        temperature: by which the champion's log-probabilities are divided, of labels or of its answer per token.
    """

    model: ScoringModel
    labels: Sequence[str] = ()
    config: ScoringConfig = field(default_factory=ScoringConfig)
    cache: ScoreCache = field(default_factory=ScoreCache)
    seed: int = 0
    committee: Sequence[ScoringModel] = ()
    line: Sequence[ScoringModel] = ()
    judge: ScoringModel | None = None
    sentences: ScoringModel | None = None
    temperature: float = 1.0

    def run(self, group: ScoreGroup, records: Sequence[ScoringInput], model: ScoringModel | None = None) -> pa.Table:
        """One group's scores of records, by the champion or another model."""
        return cached_scores(group, model or self.model, records, self.cache)

    def embeddings(self, records: Sequence[ScoringInput]) -> npt.NDArray[np.float32]:
        """Where records lie, float32 [N, D]."""
        group = embedding_group() if self.sentences is None else sentence_group()
        return to_matrix(self.run(group, records, self.sentences), "embedding")


def pool_columns(
    names: Sequence[str], scoring: ScoringContext, prompts: Sequence[Turns], base: pa.Table
) -> dict[str, Floats]:
    """Columns of the pool's table by name, float64 [N].

    Args:
        names: of scores that need no right answer.
        base: ``predicted`` [N]; for free text also ``log_probability`` [N].
    """
    pool = PoolScores(scoring, prompts, base)
    return {name: np.asarray(_COLUMNS[name](pool), np.float64) for name in names}


def labelled_columns(
    names: Sequence[str], scoring: ScoringContext, prompts: Sequence[Turns], answers: Sequence[str]
) -> dict[str, Floats]:
    """Columns of a table of labelled records by name, float64 [N].

    Args:
        names: of scores that need the right answer.
        answers: N right ones.
    """
    found: dict[str, Floats] = {}
    records = [ScoringInput(prompt, (answer,)) for prompt, answer in zip(prompts, answers, strict=True)]
    for of_group, group in _LABELLED.items():
        if asked := [name for name in of_group if name in names]:
            table = scoring.run(group(), records)
            found |= {name: table[name].to_numpy() for name in asked}
    if "forgetting_events" in names:
        line = scoring.line or [scoring.model]
        found["forgetting_events"] = forgetting_events(
            [_answers_correctly(scoring, one, prompts, answers) for one in line]
        )
    return found


class PoolScores:
    """What several columns share, computed once and only if it is asked for."""

    def __init__(self, scoring: ScoringContext, prompts: Sequence[Turns], base: pa.Table) -> None:
        self.scoring, self.base = scoring, base
        self.records = [ScoringInput(prompt) for prompt in prompts]
        answers = base["predicted"].to_pylist()
        self.answered = [ScoringInput(prompt, (answer,)) for prompt, answer in zip(prompts, answers, strict=True)]

    @cached_property
    def passes(self) -> Floats:
        """Label probabilities by T sub-networks of the champion: [T, N, K]."""
        how, labels = self.scoring.config, self.scoring.labels
        group = dropout_group(labels, how.passes, how.dropout, self.scoring.seed)
        logs = to_matrix(self.scoring.run(group, self.records), "log_probabilities").astype(np.float64)
        return np.exp(logs).reshape(len(self.records), how.passes, len(labels)).swapaxes(0, 1)

    @cached_property
    def committee(self) -> Floats:
        """Label probabilities by the latest champions, or by sub-networks where there is only one: [T, N, K]."""
        members = [*self.scoring.committee, self.scoring.model][-self.scoring.config.committee :]
        if len(members) < 2:
            log.info("  one trained champion is no committee: its passes with dropout stand in")
            return self.passes
        return np.exp(np.stack([_label_log_probabilities(self.scoring, one, self.records) for one in members]))

    @cached_property
    def samples(self) -> pa.Table:
        """Sampled answers by `SAMPLES_SCHEMA`."""
        how = self.scoring.config
        return self.scoring.run(sample_group(how.samples, how.temperature, self.scoring.seed), self.records)

    @cached_property
    def sampled(self) -> list[list[str]]:
        """The sampled answers of each record."""
        found: list[list[str]] = self.samples["answers"].to_pylist()
        return found

    @cached_property
    def by_embedding(self) -> list[list[int]]:
        """Groups of the sampled answers with like embeddings."""
        how = self.scoring.config
        return self._groups(embedding_cluster_group(how.embedder, how.similarity))

    @cached_property
    def by_entailment(self) -> list[list[int]]:
        """Groups of the sampled answers that entail each other."""
        return self._groups(entailment_cluster_group(self.scoring.judge))

    def _groups(self, group: ScoreGroup) -> list[list[int]]:
        records = [ScoringInput(one.prompt, tuple(own)) for one, own in zip(self.records, self.sampled, strict=True)]
        found: list[list[int]] = self.scoring.run(group, records)["groups"].to_pylist()
        return found

    def weighted(self, groups: list[list[int]]) -> list[float]:
        """Semantic entropy by the answers' mean log-probabilities."""
        table = self.samples
        sums, counts = table["log_probabilities"].to_pylist(), table["tokens"].to_pylist()
        means = [np.array(one) / np.maximum(1, count) for one, count in zip(sums, counts, strict=True)]
        return [semantic_entropy.semantic_entropy(own, logs) for own, logs in zip(groups, means, strict=True)]

    def stated(self) -> Floats:
        """Verbalised confidence; what gave no number is counted."""
        found: Floats = self.scoring.run(verbalised_group(), self.answered)["verbalised_confidence"].to_numpy()
        if missing := int(np.isnan(found).sum()):
            log.warning("  verbalised_confidence: no number for %d of %d records", missing, len(found))
        return found


_COLUMNS: dict[str, Callable[[PoolScores], npt.ArrayLike]] = {
    "bald": lambda pool: uncertainty.bald(pool.passes),
    "vote_entropy": lambda pool: uncertainty.vote_entropy(pool.committee),
    "consensus_kl": lambda pool: uncertainty.consensus_kl(pool.committee),
    "log_probability": lambda pool: pool.base["log_probability"].to_numpy(),
    "log_probability_variance": lambda pool: [
        np.var(logs, ddof=1) for logs in pool.samples["log_probabilities"].to_pylist()
    ],
    "token_entropy": lambda pool: pool.scoring.run(token_entropy_group(), pool.answered)["token_entropy"].to_numpy(),
    "lexical_diversity": lambda pool: list(map(sampled_answers.lexical_diversity, pool.sampled)),
    "self_consistency": lambda pool: list(map(sampled_answers.self_consistency, pool.sampled)),
    "semantic_entropy": lambda pool: pool.weighted(pool.by_embedding),
    "semantic_entropy_discrete": lambda pool: list(map(semantic_entropy.discrete_semantic_entropy, pool.by_embedding)),
    "entailment_entropy": lambda pool: pool.weighted(pool.by_entailment),
    "entailment_entropy_discrete": lambda pool: list(
        map(semantic_entropy.discrete_semantic_entropy, pool.by_entailment)
    ),
    "perplexity": lambda pool: pool.scoring.run(perplexity_group(), pool.records)["perplexity"].to_numpy(),
    "verbalised_confidence": lambda pool: pool.stated(),
}

_LABELLED: dict[tuple[str, ...], Callable[[], ScoreGroup]] = {
    ("loss", "gradient_norm"): loss_group,
    ("instruction_difficulty",): instruction_difficulty_group,
}


def _label_log_probabilities(scoring: ScoringContext, model: ScoringModel, records: Sequence[ScoringInput]) -> Floats:
    found = to_matrix(scoring.run(label_group(scoring.labels), records, model), "log_probabilities").astype(np.float64)
    _unload(scoring, model)
    return found


def _answers_correctly(
    scoring: ScoringContext, model: ScoringModel, prompts: Sequence[Turns], answers: Sequence[str]
) -> npt.NDArray[np.bool_]:
    """Whether a model answers each record rightly: bool [N]."""
    records = [ScoringInput(prompt) for prompt in prompts]
    if scoring.labels:
        best = _label_log_probabilities(scoring, model, records).argmax(axis=1)
        return np.array([scoring.labels[row] == answer for row, answer in zip(best, answers, strict=True)], bool)
    given = scoring.run(answer_group(), records, model)["predicted"].to_pylist()
    _unload(scoring, model)
    same = [
        sampled_answers.normalise_answer(one) == sampled_answers.normalise_answer(other)
        for one, other in zip(given, answers, strict=True)
    ]
    return np.array(same, bool)


def _unload(scoring: ScoringContext, model: ScoringModel) -> None:
    """Give back the memory of a model that is not the champion."""
    if model.id != scoring.model.id:
        vars(model).pop("lm", None)
