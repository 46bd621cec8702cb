"""Gathers the models and the calibration that scoring a pool needs."""

from dataclasses import asdict
from typing import Any

import numpy as np
import pyarrow as pa

from posttrain.evaluate.suite import read_evaluation
from posttrain.loop.context import RoundContext
from posttrain.loop.model_registry import ModelRegistry
from posttrain.models.embedder_source import embedder_key
from posttrain.models.task import TaskConfig
from posttrain.select.config import CHAMPION
from posttrain.select.scores.calibration import calibrate_champion
from posttrain.select.scores.context import ScoringContext
from posttrain.select.scores.passes import ScoreCache, ScoringModel
from posttrain.select.scores.table import embed_records
from posttrain.store.errors import UserError


def scoring_for(context: RoundContext, champion: str, temperature: float = 1.0) -> ScoringContext:
    """Gathers the champion and the model that embeds records.

    Args:
        context: The round.
        champion: Id of the model whose scores are computed.
        temperature: Temperature of the calibration; divides the logits.
    """
    return ScoringContext(
        ScoringModel(champion, context.config.task, lambda: context.model(champion)),
        context.config.task.label_set,
        ScoreCache(context.workspace.home / _cache_name(context)),
        context.config.seed,
        sentences=sentence_model(context.config.select.embeddings),
        temperature=temperature,
    )


def fit_calibration(context: RoundContext, scoring: ScoringContext, test: pa.Table, evaluation: str) -> dict[str, Any]:
    """Fits the temperature to test records; returns it with the calibration errors by name, empty without records.

    Args:
        context: The round.
        scoring: The champion.
        test: RECORD table.
        evaluation: Id of the champion's evaluation, whose first suite marks the answers that are right.
    """
    # Not to training records: a model is overconfident on what it was trained on.
    predictions = next(iter(read_evaluation(context.path(evaluation)).values())).predictions
    calibration = calibrate_champion(scoring, test, predictions)
    if calibration is None:
        return {}
    values = asdict(calibration)
    return {**values, "calibrated_on": values.pop("records")}


def remove_unused_scores(context: RoundContext, scoring: ScoringContext) -> None:
    """Removes cached scores of models that no round will score with again."""
    registry = ModelRegistry(context.workspace)
    models = {model.id for model in (scoring.model, scoring.sentences) if model}
    # The previous champion's too: after a rollback its scores would have to be computed again.
    models |= {registry.champion_id, *registry.earlier_champions()[:1]}
    for name in (context.config.label.embedder, context.config.drift.embedder):
        if key := head_embedder(name):
            models.add(key)
    scoring.cache.keep_only(models)


def _cache_name(context: RoundContext) -> str:
    # Scores in two precisions differ.
    return "-".join(filter(None, ("scores", context.workspace.metadata.arm, context.precision)))


def head_embedder(name: str | None) -> str | None:
    """Returns the key of the linear head's sentence model; None where there is none, or it is not installed."""
    if name is None:
        return None
    try:
        return embedder_key(name)
    except UserError:
        return None


def sentence_embeddings(context: RoundContext, name: str, records: pa.Table) -> np.ndarray:
    """Embeds records by a sentence model, float32 [N, D], in the cache that scores have.

    Args:
        context: The round.
        name: A folder, a Hub id or `minilm`.
        records: RECORD table.
    """
    model = sentence_model(name)
    assert model is not None, "the champion's hidden states are not a sentence model's"
    cache = ScoreCache(context.workspace.home / _cache_name(context))
    return embed_records(ScoringContext(model, cache=cache, sentences=model), records)


def sentence_model(name: str) -> ScoringModel | None:
    """Returns the model that embeds records; None for the champion's hidden states."""
    if name == CHAMPION:
        return None

    def load() -> Any:
        # Only now: finished embeddings need no model, and loading one takes seconds.
        from posttrain.models.embedder import Embedder

        return Embedder.load(name)

    return ScoringModel(embedder_key(name), TaskConfig(), load)
