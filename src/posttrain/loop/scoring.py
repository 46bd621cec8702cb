"""The models and the calibration that scoring a pool needs."""

from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa

from posttrain.evaluate.metrics import expected_calibration_error
from posttrain.evaluate.suite import read_evaluation
from posttrain.loop.context import RoundContext
from posttrain.loop.history import finished_states
from posttrain.loop.registry import Registry
from posttrain.models.task import TaskConfig
from posttrain.select.scores.calibration import calibrate_champion
from posttrain.select.scores.config import CHAMPION
from posttrain.select.scores.context import ScoringContext
from posttrain.select.scores.passes import ScoreCache, ScoringModel
from posttrain.store.hashing import digest, file_stats


def scoring_for(context: RoundContext, champion: str, temperature: float = 1.0) -> ScoringContext:
    """The champion, and what the scores that the config names take besides it.

    The others follow from rounds that are done, so that a killed round finds the same.

    Args:
        context: the round.
        champion: id of the model that is asked.
        temperature: as calibration found it.
    """
    names = context.config.select.wanted_scores()
    states = finished_states(context.workspace)
    committee = [state.candidate for state in states[1:] if state.action == "deploy"]
    line = [state.candidate for state in states]
    return ScoringContext(
        _model(context, champion),
        context.config.task.label_set,
        context.config.select.scoring,
        ScoreCache(context.workspace.home / "-".join(filter(None, ("scores", context.workspace.metadata.arm)))),
        context.config.seed,
        committee=_models(context, committee, champion) if {"vote_entropy", "consensus_kl"} & set(names) else (),
        line=_models(context, line) if "forgetting_events" in names else (),
        judge=_judge(context, names),
        sentences=_sentence_model(context.config.select.scoring.embeddings),
        temperature=temperature,
    )


def scoring_inputs(scoring: ScoringContext, names: Sequence[str]) -> dict[str, str]:
    """Ids of what scores depend on besides the champion, by role."""
    inputs = {f"committee {number}": one.id for number, one in enumerate(scoring.committee)}
    inputs |= {f"line {number}": one.id for number, one in enumerate(scoring.line)}
    if scoring.judge:
        inputs["judge"] = scoring.judge.id
    if any(name.startswith("semantic_entropy") for name in names):
        from posttrain.models.embedder import embedder_key

        inputs["embedder"] = embedder_key(scoring.config.embedder)
    return inputs


def scoring_settings(context: RoundContext, *, cold: bool) -> dict[str, Any]:
    """What the config contributes to the scores' key."""
    if cold:
        return {}
    names = context.config.select.wanted_scores()
    config = context.config.select.scoring.model_dump(mode="json", exclude={"judge", "embeddings"})
    if names:
        return {"scores": names, "scoring": config}
    return {"calibration": config["calibration"]}


def calibrated(context: RoundContext, scoring: ScoringContext, test: pa.Table, evaluation: str) -> dict[str, Any]:
    """Temperature and errors by name, fitted to test records, as no model is trained on those; empty without any.

    Args:
        context: the round.
        scoring: the champion.
        test: RECORD table.
        evaluation: id of the champion's, whose first suite says which answers are right.
    """
    predictions = next(iter(read_evaluation(context.path(evaluation)).values())).predictions
    calibration = calibrate_champion(scoring, test, predictions, partial(expected_calibration_error, bins=15))
    if calibration is None:
        return {}
    values = asdict(calibration)
    return {**values, "calibrated_on": values.pop("records")}


def forget_others(context: RoundContext, scoring: ScoringContext) -> None:
    """Keep only scores of models that are of use: the champion, the one before it and those that take part."""
    registry = Registry(context.workspace)
    models = {one.id for one in (scoring.model, *scoring.committee, *scoring.line, scoring.sentences) if one}
    scoring.cache.keep_only(models | {one for one in (registry.in_service, registry.previous()) if one})


def _model(context: RoundContext, id: str) -> ScoringModel:
    return ScoringModel(id, context.config.task, lambda: context.model(id))


def _models(context: RoundContext, ids: Sequence[str | None], but: str | None = None) -> list[ScoringModel]:
    """Those that are still there, each where it comes first."""
    wanted = dict.fromkeys(id for id in ids if id is not None and id != but)
    return [_model(context, id) for id in wanted if context.workspace.artifacts.exists(id)]


def _judge(context: RoundContext, names: Sequence[str]) -> ScoringModel | None:
    config = context.config.select.scoring
    if config.judge is None or not any(name.startswith("entailment_entropy") for name in names):
        return None
    folder: Path = config.judge_folder(context.workspace.root)

    def load() -> Any:
        from posttrain.models.language_model import load_language_model

        return load_language_model(folder, TaskConfig())

    return ScoringModel(digest(file_stats(folder)), TaskConfig(), load)


def _sentence_model(name: str) -> ScoringModel | None:
    if name == CHAMPION:
        return None
    from posttrain.models.embedder import Embedder, embedder_key

    return ScoringModel(embedder_key(name), TaskConfig(), lambda: Embedder.load(name))
