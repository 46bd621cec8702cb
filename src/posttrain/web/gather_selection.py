"""A round's selection as the report shows it, read from the artifacts of its stages."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as compute
import pyarrow.parquet as parquet

from posttrain.data.versions.stored_version import Version
from posttrain.loop.stages.choose import ASKED_SINCE, BATCH, MAP, SCORES
from posttrain.loop.stages.labelling import LABELS
from posttrain.models.request import request
from posttrain.store.errors import DamagedArtifact
from posttrain.store.records import ArtifactRow, Round
from posttrain.store.workspace import Workspace
from posttrain.web.charts.scatter import Points
from posttrain.web.charts.thin import Numbers
from posttrain.web.selection_data import DRAWN, ChosenRecord, Gain, PoolMap, Selection

_CALIBRATION = ("temperature", "ece_before", "ece_after")


def selections(workspace: Workspace) -> tuple[Selection, ...]:
    """The batch of each round that has chosen one, oldest first; of the latest all that is kept of it.

    What is lost or damaged is said in `Selection.missing`, not raised.
    """
    batches = [
        (entry, row, scores)
        for entry in workspace.metadata.rounds()
        if (row := workspace.metadata.artifact(entry.detail.get("selection", "")))
        and (scores := workspace.metadata.artifact(entry.detail.get("scores", "")))
    ]
    latest = len(batches) - DRAWN
    return tuple(_selection(workspace, *batch, detailed=at >= latest) for at, batch in enumerate(batches))


def _selection(
    workspace: Workspace, entry: Round, row: ArtifactRow, scores: ArtifactRow, *, detailed: bool
) -> Selection:
    settings = workspace.metadata.producers(row.id)[-1].config["select"]
    cold = bool(scores.meta["cold"])
    found = Selection(
        round=entry.number,
        strategy=row.meta.get("strategy") or settings["cold_start" if cold else "strategy"],
        records=row.meta["records"],
        scored=0 if cold else scores.meta["sampled"],
        embedded=scores.meta["sampled"] + scores.meta.get("unasked", 0),
        pool=scores.meta["pool"],
        reasons=row.meta["reasons"],
        worst_classes=tuple(row.meta.get("worst_classes", ())),
        gain=_gain(entry),
        enough=entry.detail.get("outlook", {}).get("why_stop") or "",
        calibration={name: scores.meta[name] for name in _CALIBRATION if scores.meta.get(name) is not None},
        unshared=row.meta.get("unshared"),
    )
    if not detailed:
        return found
    missing = []
    values: dict[str, float] = {}
    try:
        table = parquet.read_table(workspace.artifacts.path(scores.id) / SCORES)
        name = _goes_by(found.strategy, settings.get("options") or {}, table)
        values = _by_id(table, name)
        found = replace(found, score=name, scores=_numbers(values))
        if cold:
            missing.append("There are no scores: no model had been trained yet, so what it is unsure of says nothing.")
        elif np.isnan(found.scores).all():
            missing.append(f"There are no scores: {name} is no number for answers of this kind.")
    except DamagedArtifact as error:
        missing.append(f"The scores cannot be read: {error}.")
    try:
        folder = workspace.artifacts.path(row.id)
    except DamagedArtifact as error:
        return replace(found, missing=(*missing, f"The batch cannot be read: {error}."))
    batch = parquet.read_table(folder / BATCH).sort_by("rank")
    places = _map(folder / MAP)
    missing += [] if places else ["No map was kept of this round: it was chosen by an earlier version."]
    inputs: dict[str, tuple[str, str]] = {}
    answers: dict[str, str] = {}
    try:
        inputs, answers = _inputs(workspace, entry, batch["id"]), _answers(workspace, entry)
    except DamagedArtifact as error:
        missing.append(f"The records cannot be read: {error}.")
    if not values:  # of the scores the batch has the entropy, whatever became of the rest
        values = _by_id(batch, "uncertainty")
    elif (folder / ASKED_SINCE).exists():
        since = _by_id(parquet.read_table(folder / ASKED_SINCE), found.score)
        found = replace(found, scored_since=_numbers(since))
        values |= since
    chosen = tuple(_chosen(one, values, inputs, answers) for one in batch.to_pylist())
    return replace(found, map=places, chosen=chosen, missing=tuple(missing))


def _gain(entry: Round) -> Gain | None:
    """What the round noted of its expectations before it asked, with what came of it."""
    said = entry.detail.get("outlook", {}).get("expected_gain")
    if not said:
        return None
    paired = (entry.decision or {}).get("intervals", {}).get(said["metric"])
    achieved = paired["difference"] if paired else None
    return Gain(entry.number, said["metric"], said["gain"], said["low"], said["high"], achieved)


def _goes_by(strategy: str, options: Mapping[str, Any], scores: pa.Table) -> str:
    """The column of numbers that a strategy goes by; entropy for those that go by none."""
    numbers = [field.name for field in scores.schema if pa.types.is_floating(field.type)]
    return next((name for name in (str(options.get("by")), strategy) if name in numbers), "entropy")


def _by_id(scores: pa.Table, name: str) -> dict[str, float]:
    return dict(zip(scores["id"].to_pylist(), scores[name].to_pylist(), strict=True))


def _numbers(values: Mapping[str, float]) -> Numbers:
    return np.array(list(values.values()), np.float64)


def _map(path: Path) -> PoolMap | None:
    if not path.exists():
        return None
    table = parquet.read_table(path)

    def points(kind: str) -> Points:
        some = table.filter(compute.equal(table["kind"], kind))
        return np.column_stack([some["x"].to_numpy(), some["y"].to_numpy()])

    chosen = table.filter(compute.equal(table["kind"], "chosen"))
    places = zip(chosen["x"].to_pylist(), chosen["y"].to_pylist(), strict=True)
    return PoolMap(dict(zip(chosen["id"].to_pylist(), places, strict=True)), points("pool"), points("labelled"))


def _inputs(workspace: Workspace, entry: Round, ids: pa.ChunkedArray) -> dict[str, tuple[str, str]]:
    """By the id of a chosen record the id of its input, and what was asked."""
    version = Version.open(workspace.artifacts, entry.detail["asked"])
    wanted = pa.array(ids.to_pylist(), pa.string())
    return {
        row["id"]: (row["input_id"], _text(row))
        for table in version.tables(columns=["id", "input_id", "prompt", "text"])
        for row in table.filter(compute.is_in(table["id"], value_set=wanted)).to_pylist()
    }


def _text(record: Mapping[str, Any]) -> str:
    return " / ".join(turn["content"] for turn in request(record) if turn["role"] != "system")


def _answers(workspace: Workspace, entry: Round) -> dict[str, str]:
    """By the id of the input the label that was given; none while the round waits for them."""
    if "labelled" not in entry.detail:
        return {}
    columns = ["input_id", "completion"]
    table = parquet.read_table(workspace.artifacts.path(entry.detail["labelled"]) / LABELS, columns=columns)
    return dict(zip(table["input_id"].to_pylist(), table["completion"].to_pylist(), strict=True))


def _chosen(
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
        why=row.get("why") or "",
        inclusion=row.get("inclusion"),
    )
