"""Gathers the models and the calibration that scoring a pool needs."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from posttrain.evaluate.suite import read_evaluation
from posttrain.loop.context import RoundContext
from posttrain.loop.history import finished_states
from posttrain.loop.model_registry import ModelRegistry
from posttrain.models.embedder_source import embedder_key
from posttrain.models.task import TaskConfig
from posttrain.select.scores.calibration import calibrate_champion
from posttrain.select.scores.config import CHAMPION
from posttrain.select.scores.context import ScoringContext
from posttrain.select.scores.passes import ScoreCache, ScoringModel
from posttrain.select.scores.table import embed_records
from posttrain.store.errors import UserError
from posttrain.store.hashing import digest, file_stats


def scoring_for(context: RoundContext, champion: str, temperature: float = 1.0) -> ScoringContext:
    """Gathers the champion and the other models that the configured scores need.

    Args:
        context: The round.
        champion: Id of the model whose scores are computed.
        temperature: Temperature of the calibration; divides the logits.
    """
    names = context.config.select.wanted_scores()
    # Committee and past champions follow from finished rounds alone, so a killed round finds the same models again.
    states = finished_states(context.workspace)
    committee = [state.candidate for state in states[1:] if state.action == "deploy"]
    past_champions = [state.candidate for state in states]
    model = _model(context, champion)
    return ScoringContext(
        model,
        context.config.task.label_set,
        context.config.select.scoring,
        ScoreCache(context.workspace.home / _cache_name(context)),
        context.config.seed,
        committee=_models(context, committee, champion) if {"vote_entropy", "consensus_kl"} & set(names) else (),
        # The champion itself where it is among them, or its weights would be loaded a second time.
        past_champions=[model if past.id == champion else past for past in _models(context, past_champions)]
        if "forgetting_events" in names
        else (),
        judge=_judge(context, names),
        sentences=sentence_model(context.config.select.scoring.embeddings),
        temperature=temperature,
    )


def scoring_inputs(scoring: ScoringContext, names: Sequence[str]) -> dict[str, str]:
    """Returns the ids of the models that scores depend on besides the champion, by role."""
    inputs = {f"committee {number}": model.id for number, model in enumerate(scoring.committee)}
    inputs |= {f"line {number}": model.id for number, model in enumerate(scoring.past_champions)}
    if scoring.judge:
        inputs["judge"] = scoring.judge.id
    if any(name.startswith("semantic_entropy") for name in names):
        inputs["embedder"] = embedder_key(scoring.config.embedder)
    return inputs


def scoring_settings(context: RoundContext, *, cold: bool) -> dict[str, Any]:
    """Returns the part of the config that the scores' key holds."""
    # Embeddings depend on none of these settings: a change of the scores redoes no cold start.
    if cold:
        return {}
    names = context.config.select.wanted_scores()
    # The judge and the sentence model are inputs, by the digest of their files instead of their path.
    config = context.config.select.scoring.model_dump(mode="json", exclude={"judge", "embeddings"})
    if names:
        return {"scores": names, "scoring": config}
    return {"calibration": config["calibration"]}


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
    models = {
        model.id for model in (scoring.model, *scoring.committee, *scoring.past_champions, scoring.sentences) if model
    }
    # The previous champion's too: after a rollback its scores would have to be computed again.
    models |= {registry.champion_id, *registry.earlier_champions()[:1]}
    for name in (context.config.label.embedder, context.config.drift.embedder):
        if key := head_embedder(name):
            models.add(key)
    scoring.cache.keep_only(models)


def _cache_name(context: RoundContext) -> str:
    # Scores in two precisions differ.
    return "-".join(filter(None, ("scores", context.workspace.metadata.arm, context.precision)))


def _model(context: RoundContext, id: str) -> ScoringModel:
    return ScoringModel(id, context.config.task, lambda: context.model(id))


def _models(context: RoundContext, ids: Sequence[str | None], but: str | None = None) -> list[ScoringModel]:
    """Returns the models that are still stored, each once, in the order of their first rounds."""
    distinct = dict.fromkeys(id for id in ids if id is not None and id != but)
    return [_model(context, id) for id in distinct if context.workspace.artifacts.exists(id)]


def _judge(context: RoundContext, names: Sequence[str]) -> ScoringModel | None:
    config = context.config.select.scoring
    if config.judge is None or not any(name.startswith("entailment_entropy") for name in names):
        return None
    folder: Path = config.judge_folder(context.workspace.root)

    def load() -> Any:
        # A pool that is cached needs no model, and loading transformers takes seconds.
        from posttrain.models.language_model import load_language_model

        return load_language_model(folder, TaskConfig(), context.precision)

    return ScoringModel(digest(file_stats(folder)), TaskConfig(), load)


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
    assert model is not None, "the champion's hidden states are no sentence model's"
    cache = ScoreCache(context.workspace.home / _cache_name(context))
    return embed_records(ScoringContext(model, cache=cache, sentences=model), records)


def sentence_model(name: str) -> ScoringModel | None:
    """Returns the model that embeds records; None for the champion's hidden states."""
    if name == CHAMPION:
        return None

    def load() -> Any:
        # As for the judge: finished embeddings need no model.
        from posttrain.models.embedder import Embedder

        return Embedder.load(name)

    return ScoringModel(embedder_key(name), TaskConfig(), load)
