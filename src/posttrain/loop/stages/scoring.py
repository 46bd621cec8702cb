"""Who scores a round's records: the champion, those before it, a judge; and what was scored before."""

from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa

from posttrain.evaluate.artifact import read_evaluation
from posttrain.evaluate.metrics import expected_calibration_error
from posttrain.loop.history import finished_rounds
from posttrain.loop.registry import Registry
from posttrain.loop.turn import Turn
from posttrain.models.task import TaskConfig
from posttrain.select.held_out_calibration import calibration
from posttrain.select.scores.cache import ScoreCache
from posttrain.select.scores.columns import Scoring
from posttrain.select.scores.config import CHAMPION
from posttrain.select.scores.group import ScoringModel
from posttrain.store.hashing import digest, file_states


def scoring_for(turn: Turn, champion: str, temperature: float = 1.0) -> Scoring:
    """The champion, and what the scores that the config names take besides it.

    The others follow from rounds that are done, so that a killed round finds the same.

    Args:
        turn: the round.
        champion: id of the model that is asked.
        temperature: as calibration found it.
    """
    names = turn.config.select.wanted_scores()
    rounds = finished_rounds(turn.workspace)
    committee = [entry.candidate for entry in rounds[1:] if entry.decision and entry.decision["action"] == "deploy"]
    line = [entry.candidate for entry in rounds]
    return Scoring(
        _model(turn, champion),
        turn.config.task.label_set,
        turn.config.select.scoring,
        ScoreCache(turn.workspace.home / "-".join(filter(None, ("scores", turn.workspace.metadata.arm)))),
        turn.config.seed,
        committee=_models(turn, committee, champion) if {"vote_entropy", "consensus_kl"} & set(names) else (),
        line=_models(turn, line) if "forgetting_events" in names else (),
        judge=_judge(turn, names),
        sentences=_sentence_model(turn.config.select.scoring.embeddings),
        temperature=temperature,
    )


def scoring_inputs(scoring: Scoring, names: Sequence[str]) -> dict[str, str]:
    """Ids of what scores depend on besides the champion, by role."""
    found = {f"committee {number}": one.id for number, one in enumerate(scoring.committee)}
    found |= {f"line {number}": one.id for number, one in enumerate(scoring.line)}
    if scoring.judge:
        found["judge"] = scoring.judge.id
    if any(name.startswith("semantic_entropy") for name in names):
        from posttrain.models.embedder import embedder_key

        found["embedder"] = embedder_key(scoring.config.embedder)
    return found


def scoring_settings(turn: Turn, *, cold: bool) -> dict[str, Any]:
    """What the config contributes to the scores' key."""
    if cold:
        return {}
    names = turn.config.select.wanted_scores()
    config = turn.config.select.scoring.model_dump(mode="json", exclude={"judge", "embeddings"})
    if names:
        return {"scores": names, "scoring": config}
    return {"calibration": config["calibration"]}


def calibrated(turn: Turn, scoring: Scoring, test: pa.Table, evaluation: str) -> dict[str, Any]:
    """Temperature and errors by name, fitted to test records, as no model is trained on those; empty without any.

    Args:
        turn: the round.
        scoring: the champion.
        test: RECORD table.
        evaluation: id of the champion's, whose first suite says which answers are right.
    """
    predictions = next(iter(read_evaluation(turn.path(evaluation)).values())).predictions
    found = calibration(scoring, test, predictions, partial(expected_calibration_error, bins=15))
    if found is None:
        return {}
    values = asdict(found)
    return {**values, "calibrated_on": values.pop("records")}


def forget_others(turn: Turn, scoring: Scoring) -> None:
    """Keep only scores of models that are of use: the champion, the one before it and those that take part."""
    registry = Registry(turn.workspace)
    models = {one.id for one in (scoring.model, *scoring.committee, *scoring.line, scoring.sentences) if one}
    scoring.cache.keep_only(models | {one for one in (registry.in_service, registry.previous()) if one})


def _model(turn: Turn, id: str) -> ScoringModel:
    return ScoringModel(id, turn.config.task, lambda: turn.model(id))


def _models(turn: Turn, ids: Sequence[str | None], but: str | None = None) -> list[ScoringModel]:
    """Those that are still there, each where it comes first."""
    wanted = dict.fromkeys(id for id in ids if id is not None and id != but)
    return [_model(turn, id) for id in wanted if turn.workspace.artifacts.exists(id)]


def _judge(turn: Turn, names: Sequence[str]) -> ScoringModel | None:
    config = turn.config.select.scoring
    if config.judge is None or not any(name.startswith("entailment_entropy") for name in names):
        return None
    folder: Path = config.judge_folder(turn.workspace.root)

    def load() -> Any:
        from posttrain.models.language_model import load

        return load(folder, TaskConfig())

    return ScoringModel(digest(file_states(folder)), TaskConfig(), load)


def _sentence_model(name: str) -> ScoringModel | None:
    if name == CHAMPION:
        return None
    from posttrain.models.embedder import Embedder, embedder_key

    return ScoringModel(embedder_key(name), TaskConfig(), lambda: Embedder.load(name))
