"""Reads the batches of the rounds: which records were chosen, why, and where they lie."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as compute
import pyarrow.parquet as parquet

from posttrain.data.versions.version import Version
from posttrain.loop.gain import STAGE as GAIN
from posttrain.loop.gain import current_estimate
from posttrain.loop.model_registry import ModelRegistry
from posttrain.loop.record import LoopRecord, RoundRecord
from posttrain.loop.score_files import ASKED_SINCE, BATCH, LABELS, MAP, SCORES
from posttrain.loop.state import RoundState
from posttrain.models.task import record_turns
from posttrain.report.charts.curve import FloatArray
from posttrain.report.charts.scatter import Points
from posttrain.store.errors import DamagedArtifactError
from posttrain.store.message import Message
from posttrain.store.rows import ArtifactRow
from posttrain.store.workspace import Workspace

SELECTIONS_SHOWN = 20
"""Number of rounds whose batch is shown in full, the latest; earlier ones are only counted."""

_CALIBRATION = ("temperature", "ece_before", "ece_after")


@dataclass(frozen=True)
class ChosenRecord:
    """A record selected for labelling.

    ``score`` is None where no model has scored it, ``label`` while nobody has labelled it; ``why`` is more than the
    reason says, and ``inclusion`` the probability with which it was drawn, where the batch has them.
    """

    id: str
    rank: int
    reason: str
    score: float | None
    predicted: str | None
    label: str | None
    input: str
    why: str = ""
    inclusion: float | None = None


@dataclass(frozen=True)
class PoolMap:
    """A 2-D map of the records: ``chosen`` by id, the others as float [N, 2]."""

    chosen: Mapping[str, tuple[float, float]]
    pool: Points = field(default_factory=lambda: np.zeros((0, 2)))
    labelled: Points = field(default_factory=lambda: np.zeros((0, 2)))


@dataclass(frozen=True)
class RoundGain:
    """The expected and achieved gain of a round, in the metric's own unit.

    ``achieved`` is the candidate's value less that of the champion that it had to beat, on the same records; None
    while the round is open.
    """

    round: int
    metric: str
    expected: float
    low: float
    high: float
    achieved: float | None = None


@dataclass(frozen=True)
class Selection:
    """One round's batch.

    Args:
        round: its number.
        strategy: name of the strategy that chose it.
        records: number of records in it.
        scored: number of records scored before the selection.
        embedded: number of records that it was chosen from.
        pool: number of free records in the pool.
        reasons: number of records chosen for each reason.
        worst_classes: the classes with the worst evaluation.
        chosen: by rank.
        map: where the records lie; None where that is not kept.
        score: name of the score that the strategy goes by.
        scores: float64 [N] of what was scored before it was chosen, NaN where the model says nothing.
        scored_since: float64 [M] of those that were chosen without that.
        gain: expected and achieved; None without an expectation.
        gain_unknown: why there is none, where that is not for want of rounds.
        stop_reason: why more labels have stopped to improve the model; "" if they may still.
        calibration: ``temperature`` that the scores were divided by, with ``ece_before`` and ``ece_after``; empty where
            they are as the model gave them.
        neighbour_kappa: agreement of neighbours' labels where it was too low for `auto` to cover the pool; else None.
        missing: sentences on what cannot be shown, and why.
    """

    round: int
    strategy: str
    records: int
    scored: int
    embedded: int
    pool: int
    reasons: Mapping[str, int]
    worst_classes: tuple[str, ...] = ()
    chosen: tuple[ChosenRecord, ...] = ()
    map: PoolMap | None = None
    score: str = "entropy"
    scores: FloatArray = field(default_factory=lambda: np.zeros(0))
    scored_since: FloatArray = field(default_factory=lambda: np.zeros(0))
    gain: RoundGain | None = None
    gain_unknown: str = ""
    stop_reason: str = ""
    calibration: Mapping[str, float] = field(default_factory=dict)
    neighbour_kappa: float | None = None
    missing: tuple[str, ...] = ()


def read_selections(loop: LoopRecord) -> list[Selection]:
    """Reads each round's batch, oldest first; of the latest also records, scores and map.

    Lost or damaged artifacts are named in `Selection.missing`, and raise no error.
    """
    batches = [
        (record, row, scores)
        for record in loop.rounds
        if (row := record.artifact(record.state.selection)) and (scores := record.artifact(record.state.scores))
    ]
    champion = ModelRegistry(loop.workspace).champion
    in_service = champion.model_id if champion else None
    # Reading records and maps of every round would make the report of a long loop slow and large.
    latest = len(batches) - SELECTIONS_SHOWN
    return [_read_selection(in_service, *batch, detailed=at >= latest) for at, batch in enumerate(batches)]


def _read_selection(
    champion: str | None, record: RoundRecord, row: ArtifactRow, scores: ArtifactRow, *, detailed: bool
) -> Selection:
    workspace, state = record.workspace, record.state
    cold = bool(scores.meta["cold"])
    estimate = current_estimate(state, champion) or {}
    selection = Selection(
        round=record.number,
        strategy=row.meta["strategy"],
        records=row.meta["records"],
        scored=0 if cold else scores.meta["sampled"],
        embedded=scores.meta["sampled"] + scores.meta["unscored"],
        pool=scores.meta["pool"],
        reasons=row.meta["reasons"],
        worst_classes=tuple(row.meta["worst_classes"]),
        gain=_read_gain(record.number, state, estimate),
        gain_unknown=estimate.get("unknown") or "",
        stop_reason=(state.results.get(GAIN) or {}).get("why_stop") or "",
        calibration={name: scores.meta[name] for name in _CALIBRATION if scores.meta.get(name) is not None},
        neighbour_kappa=row.meta.get("unshared"),
    )
    if not detailed:
        return selection
    missing: list[str] = []
    values: dict[str, float] = {}
    try:
        table = parquet.read_table(workspace.artifacts.path(scores.id) / SCORES)
        name = _score_column(selection.strategy, row.meta["options"], table)
        values = _column_by_id(table, name)
        selection = replace(selection, score=name, scores=_as_array(values))
        if cold:
            missing.append(
                Message("There are no scores: no model had been trained yet, so what it is unsure of says nothing.")
            )
        elif np.isnan(selection.scores).all():
            missing.append(Message("There are no scores: {name} is not a number for answers of this kind.", name=name))
    except DamagedArtifactError as error:
        missing.append(Message("The scores cannot be read: {error}.", error=error))
    try:
        folder = workspace.artifacts.path(row.id)
    except DamagedArtifactError as error:
        return replace(selection, missing=(*missing, Message("The batch cannot be read: {error}.", error=error)))
    batch = parquet.read_table(folder / BATCH).sort_by("rank")
    pool_map = _read_map(folder / MAP)
    inputs: dict[str, tuple[str, str]] = {}
    answers: dict[str, str] = {}
    try:
        inputs = _read_inputs(workspace, state.id("queried_pool"), batch["id"])
        answers = _read_answers(workspace, state.labelled)
    except DamagedArtifactError as error:
        missing.append(Message("The records cannot be read: {error}.", error=error))
    # The batch itself keeps the entropy if the score table is lost.
    if not values:
        values = _column_by_id(batch, "uncertainty")
    elif (folder / ASKED_SINCE).exists():
        # Records that were only embedded got their scores after the choice: the histogram has to include them.
        since = _column_by_id(parquet.read_table(folder / ASKED_SINCE), selection.score)
        selection = replace(selection, scored_since=_as_array(since))
        values |= since
    records = tuple(_chosen_record(record, values, inputs, answers) for record in batch.to_pylist())
    return replace(selection, map=pool_map, chosen=records, missing=tuple(missing))


def _read_gain(number: int, state: RoundState, estimate: Mapping[str, Any]) -> RoundGain | None:
    """Reads the gain expected before labelling, and the gain achieved."""
    expected = estimate.get("expected_gain")
    if not expected:
        return None
    paired = (state.decision or {}).get("intervals", {}).get(expected["metric"])
    achieved = paired["difference"] if paired else None
    return RoundGain(number, expected["metric"], expected["gain"], expected["low"], expected["high"], achieved)


def _score_column(strategy: str, options: Mapping[str, Any], scores: pa.Table) -> str:
    """Returns the score column that a strategy ranks by; entropy for strategies without one."""
    numbers = [field.name for field in scores.schema if pa.types.is_floating(field.type)]
    return next((name for name in (str(options.get("by")), strategy) if name in numbers), "entropy")


def _column_by_id(scores: pa.Table, name: str) -> dict[str, float]:
    return dict(zip(scores["id"].to_pylist(), scores[name].to_pylist(), strict=True))


def _as_array(values: Mapping[str, float]) -> FloatArray:
    return np.array(list(values.values()), np.float64)


def _read_map(path: Path) -> PoolMap:
    table = parquet.read_table(path)

    def points(kind: str) -> Points:
        rows = table.filter(compute.equal(table["kind"], kind))
        return np.column_stack([rows["x"].to_numpy(), rows["y"].to_numpy()])

    batch = table.filter(compute.equal(table["kind"], "chosen"))
    positions = zip(batch["x"].to_pylist(), batch["y"].to_pylist(), strict=True)
    return PoolMap(dict(zip(batch["id"].to_pylist(), positions, strict=True)), points("pool"), points("labelled"))


def _read_inputs(workspace: Workspace, pool: str, ids: pa.ChunkedArray) -> dict[str, tuple[str, str]]:
    """Maps a chosen record's id to the id of its input and to its prompt."""
    version = Version.open(workspace.artifacts, pool)
    keys = pa.array(ids.to_pylist(), pa.string())
    return {
        row["id"]: (row["input_id"], _request_text(row))
        for table in version.tables(columns=["id", "input_id", "prompt", "text"])
        for row in table.filter(compute.is_in(table["id"], value_set=keys)).to_pylist()
    }


def _request_text(record: Mapping[str, Any]) -> str:
    return " / ".join(turn["content"] for turn in record_turns(record) if turn["role"] != "system")


def _read_answers(workspace: Workspace, labels: str | None) -> dict[str, str]:
    """Maps an input's id to its label; empty while the round waits for labels."""
    if labels is None:
        return {}
    # By the input's id: a record's own id changes with its label.
    table = parquet.read_table(workspace.artifacts.path(labels) / LABELS, columns=["input_id", "completion"])
    return dict(zip(table["input_id"].to_pylist(), table["completion"].to_pylist(), strict=True))


def _chosen_record(
    row: Mapping[str, Any],
    scores: Mapping[str, float],
    inputs: Mapping[str, tuple[str, str]],
    answers: Mapping[str, str],
) -> ChosenRecord:
    input_id, text = inputs.get(row["id"], ("", ""))
    score = scores.get(row["id"])
    return ChosenRecord(
        id=row["id"],
        rank=row["rank"],
        reason=row["reason"],
        score=None if score is None or np.isnan(score) else float(score),
        predicted=row["predicted"],
        label=answers.get(input_id),
        input=text,
        why=row["why"] or "",
        inclusion=row.get("inclusion"),
    )
