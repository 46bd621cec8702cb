"""Reports the state of the loop, for people and programs."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from posttrain.data.reading.reader import read
from posttrain.inspect.champion import champion_problems, last_rollback
from posttrain.label.people import PeopleAnnotator
from posttrain.label.queue import Queue
from posttrain.loop.canary import canary_problems, describe_canary
from posttrain.loop.config import Config
from posttrain.loop.history import finished_rounds, finished_states
from posttrain.loop.model_registry import ModelRegistry
from posttrain.loop.record import RoundRecord, StageReport, read_rounds
from posttrain.loop.round import ROUND_ZERO, known_steps, stage_reports
from posttrain.loop.stage import CachedWork
from posttrain.loop.state import RoundState
from posttrain.report.section import Text
from posttrain.store.files import is_locked
from posttrain.store.rows import Round, Run
from posttrain.store.workspace import Workspace


def status(workspace: Workspace, config: Config) -> dict[str, Any]:
    """Reports the loop's state.

    Returns:
        ``round``: number of the round in progress, or of the last one; ``champion``: id, round, metrics, path and
        damage (a line for each file that is missing or has another size), or None; ``waiting``: what the loop waits
        for, or None; ``rounds``: for each its round, status, labels (in its training set), metrics, decision, seconds,
        stages (seconds by stage), model_seconds, what its stages report under keys of their own (such as batch,
        forecast, drift, models, head, tuning; see `RoundStep.report`), and sentences (by stage);
        ``final``: the champion and its metrics on all test records, or None; ``canary``: id, model, share, since, line
        and problems of the canary that runs, or None; ``rollback``: the roll-back that restored
        the champion, see `posttrain.inspect.champion.RollbackReport`, or None; ``rounds_wanted``: number of the last
        round, None without an end; ``stages``: of the round in progress, or of the last round, each stage's name, state
        (``done``, ``running``, ``waiting``, ``failed``, ``open``, or ``unused`` for one that had nothing to do) and
        seconds; ``working``: whether a process works on the loop.
    """
    records = read_rounds(workspace).rounds
    rounds = [record.row for record in records]
    # All at once: two queries for each of many rounds would be too slow for a page that follows the loop.
    runs = workspace.metadata.runs()
    working = is_working(workspace)
    finished = finished_states(workspace)
    champion = _champion(workspace)
    return {
        "round": rounds[-1].number if rounds else None,
        "rounds_wanted": config.rounds,
        "champion": champion,
        "waiting": _waiting(workspace, config),
        "canary": _canary(workspace),
        "rounds": [
            _round(record, [run for run in runs if run.round == record.number], stage_reports(config, record))
            for record in records
        ],
        "final": finished[-1].final_of(champion["id"]) if finished and champion else None,
        "rollback": rollback.to_json() if (rollback := last_rollback(workspace)) else None,
        "stages": _stages(config, rounds, runs, working),
        "working": working,
    }


def is_working(workspace: Workspace) -> bool:
    """Returns whether a process runs this loop, as far as the note beside its lock tells."""
    return is_locked(workspace.lock_path(workspace.loop_lock))


def _stages(config: Config, rounds: Sequence[Round], runs: Sequence[Run], working: bool) -> list[dict[str, Any]]:
    """Reports the stages of the round in progress, or of the last one."""
    steps = ROUND_ZERO if rounds and rounds[-1].number == 0 else known_steps(config)
    ever = {run.stage.split(" ")[0] for run in runs}
    runs_of: dict[str, list[Run]] = {step.name: [] for step in steps}
    for run in runs:
        if rounds and run.round == rounds[-1].number:
            runs_of.setdefault(run.stage.split(" ")[0], []).append(run)
    begun = [at for at, step in enumerate(steps) if runs_of[step.name]]
    stages = []
    for at, step in enumerate(steps):
        name = step.name
        last = runs_of[name][-1].status if runs_of[name] else None
        # A stage whose work an earlier round did has no run of its own.
        if (rounds and rounds[-1].status == "done") or last == "done" or (last is None and begun and at < begun[-1]):
            state = "done" if name in ever or not issubclass(step, CachedWork) else "unused"
        elif last == "running":
            state = "running" if working else "failed"
        else:
            state = last or "open"
        stages.append({"name": name, "state": state, "seconds": sum(run.seconds or 0.0 for run in runs_of[name])})
    return stages


def _stage_seconds(runs: Iterable[Run]) -> dict[str, float]:
    seconds: dict[str, float] = {}
    for run in runs:
        # `collect pool`, `collect test` and `collect labelled` are one stage to a reader.
        stage = run.stage.split(" ")[0]
        seconds[stage] = seconds.get(stage, 0.0) + (run.seconds or 0.0)
    return seconds


def model_seconds(workspace: Workspace, number: int) -> float:
    """Sums the seconds of one round in which a model was computing: training, scoring, answering, timing."""
    return _model_seconds(workspace.metadata.runs(round=number, status="done"))


def _model_seconds(runs: Iterable[Run]) -> float:
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


def _canary(workspace: Workspace) -> dict[str, Any] | None:
    canary = ModelRegistry(workspace).running_canary
    if canary is None:
        return None
    return {
        "id": canary.id,
        "model": canary.model_id,
        "share": canary.share,
        "since": canary.created_at.isoformat(timespec="seconds"),
        "line": describe_canary(canary),
        "problems": canary_problems(canary),
    }


def _waiting(workspace: Workspace, config: Config) -> str | None:
    rounds = workspace.metadata.rounds()
    # An open round that waited before still has the text in its row until its batch is scored again.
    if not rounds or rounds[-1].status == "open":
        return None
    waits_for, number = RoundState.from_row(rounds[-1]).waits_for, rounds[-1].number
    queue = Queue(workspace.metadata, config.label.queue)
    batch = next((batch for batch in queue.batches("open") if batch.round == number), None)
    # The row says what was missing when the loop looked last: answers and accounts have come since.
    return PeopleAnnotator(queue, read).describe_waiting(batch, waits_for) if waits_for and batch else waits_for


def _round(record: RoundRecord, runs: Sequence[Run], reports: Mapping[str, StageReport]) -> dict[str, Any]:
    state, done = record.state, [run for run in runs if run.status == "done"]
    return {
        "round": record.number,
        "status": record.row.status,
        "labels": state.labels,
        "metrics": state.metrics or {},
        "decision": state.action,
        "seconds": record.row.seconds,
        "stages": _stage_seconds(done),
        "model_seconds": _model_seconds(done),
        **stage_values(reports),
    }


def stage_values(reports: Mapping[str, StageReport]) -> dict[str, Any]:
    """Returns what stages report of a round as JSON values, with their sentences by stage.

    ``sentences`` are those that every round has, ``latest`` those that a later round's replace, and ``details`` those
    that are news to nobody who has not asked for the round.
    """
    values = {key: value for report in reports.values() for key, value in report.values.items()}
    sentences = {name: list(report.lines) for name, report in reports.items() if report.lines}
    latest = {name: list(report.latest) for name, report in reports.items() if report.latest}
    details = [block.text for report in reports.values() for block in report.blocks if isinstance(block, Text)]
    return {**values, "sentences": sentences, "latest": latest, "details": details}
