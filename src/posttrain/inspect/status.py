"""Reports the state of the loop, for people and programs."""

from typing import Any

from posttrain.inspect.champion import champion_problems
from posttrain.loop.config import Config
from posttrain.loop.history import finished_rounds, finished_states
from posttrain.loop.model_registry import ModelRegistry
from posttrain.loop.state import RoundState
from posttrain.store.rows import Round
from posttrain.store.workspace import Workspace


def status(workspace: Workspace, config: Config) -> dict[str, Any]:
    """Reports the loop's state.

    Returns:
        ``round``: number of the round in progress, or of the last one; ``champion``: id, round, metrics, path and
        damage (a line for each file that is missing or has another size), or None; ``waiting``: what the loop waits
        for, or None; ``rounds``: for each its round, status, labels, metrics, decision, seconds, stages (seconds by
        stage), model_seconds; ``final``: the champion and its metrics on all test records, or None; ``rounds_wanted``.
    """
    rounds = workspace.metadata.rounds()
    finished = finished_states(workspace)
    champion = _champion(workspace)
    return {
        "round": rounds[-1].number if rounds else None,
        "rounds_wanted": config.rounds,
        "champion": champion,
        "waiting": _waiting(workspace),
        "rounds": [_round(workspace, entry) for entry in rounds],
        "final": finished[-1].final_of(champion["id"]) if finished and champion else None,
    }


def stage_seconds(workspace: Workspace, number: int) -> dict[str, float]:
    """Sums the seconds of finished work by stage in one round."""
    seconds: dict[str, float] = {}
    for run in workspace.metadata.runs(round=number, status="done"):
        # `collect pool`, `collect test` and `collect labelled` are one stage to a reader.
        stage = run.stage.split(" ")[0]
        seconds[stage] = seconds.get(stage, 0.0) + (run.seconds or 0.0)
    return seconds


def model_seconds(workspace: Workspace, number: int) -> float:
    """Sums the seconds of one round in which a model was computing: training, scoring, answering, timing."""
    runs = workspace.metadata.runs(round=number, status="done")
    # By task and not by stage: a stage also reads, writes and hashes files.
    return sum(sum(run.detail.get("tasks", {}).values()) for run in runs)


def _champion(workspace: Workspace) -> dict[str, Any] | None:
    champion = ModelRegistry(workspace).champion
    if champion is None:
        return None
    trained = [entry for entry in finished_rounds(workspace) if entry.candidate == champion.model_id]
    return {
        "id": champion.model_id,
        "round": trained[-1].number if trained else champion.round,
        # A model promoted by hand out of an unfinished round has no metrics of its own round.
        "metrics": (RoundState.from_row(trained[-1]).metrics or {}) if trained else {},
        "path": str(workspace.champion_path),
        "damage": champion_problems(workspace, champion.model_id),
    }


def _waiting(workspace: Workspace) -> str | None:
    rounds = workspace.metadata.rounds()
    # An open round that waited before still has the text in its row until its batch is scored anew.
    if not rounds or rounds[-1].status == "open":
        return None
    return RoundState.from_row(rounds[-1]).waits_for


def _round(workspace: Workspace, entry: Round) -> dict[str, Any]:
    state = RoundState.from_row(entry)
    return {
        "round": entry.number,
        "status": entry.status,
        "labels": state.labels,
        "metrics": state.metrics or {},
        "decision": state.action,
        "seconds": entry.seconds,
        "stages": stage_seconds(workspace, entry.number),
        "model_seconds": model_seconds(workspace, entry.number),
    }
