"""Looks up an id (artifact, run, round, record, dataset version) with its lineage, and searches records by text."""

import itertools
import json
import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as compute

from posttrain.data.versions.version import Version
from posttrain.inspect.status import stage_values
from posttrain.loop.batch_counts import read_unlabelled
from posttrain.loop.config import Config
from posttrain.loop.record import RoundRecord
from posttrain.loop.round import stage_reports
from posttrain.loop.stages.pseudo import is_pseudo
from posttrain.loop.state import RoundState
from posttrain.store.errors import DamagedArtifactError, UserError, WorkError
from posttrain.store.metadata import Metadata
from posttrain.store.rows import ArtifactRow, Run
from posttrain.store.workspace import Workspace

log = logging.getLogger("posttrain")


@dataclass(frozen=True)
class Relative:
    """An artifact some steps away.

    Attributes:
        depth: Steps between it and the artifact that was looked up, by the shortest path; 0 is the artifact itself.
        run: The first finished run that made it; None if there is none.
    """

    depth: int
    artifact: ArtifactRow
    run: Run | None


def show(workspace: Workspace, text: str, config: Config | None = None) -> dict[str, Any]:
    """Looks up an id or a name; returns all fields of it, with its lineage.

    Args:
        workspace: The workspace.
        text: An artifact's or run's id or the beginning of one, ``name@vN``, ``round N`` or ``N``,
            ``champion``, or a record's id.
        config: The config, whose own stages report of a round too.

    Raises:
        UserError: nothing has this name, or more than one thing has.
    """
    if text == "champion":
        deployments = workspace.metadata.deployments()
        if not deployments:
            raise UserError("there is no champion yet", fix="posttrain run")
        text = deployments[-1].model_id
    number = text.removeprefix("round").strip()
    # Ids may consist of digits alone; none is so short.
    if number.isdecimal() and len(number) < 6:
        return _round(workspace, int(number), config)
    if record := _record(workspace, text):
        return record
    id = workspace.metadata.resolve(text)
    if run := workspace.metadata.run(id):
        return {"type": "run", **_plain(asdict(run))}
    return _artifact(workspace, id)


def _artifact(workspace: Workspace, id: str) -> dict[str, Any]:
    row = workspace.metadata.artifact(id)
    assert row is not None
    names = [entry.text for entry in workspace.metadata.names() if entry.artifact_id == id]
    parents = [_relative(relative) for relative in ancestors(workspace.metadata, id)]
    details = {
        "type": "artifact",
        **_plain(asdict(row)),
        "damage": _size_problems(workspace, id),
        "names": names,
        "runs": [_plain(asdict(run)) for run in workspace.metadata.producers(id)],
        "ancestors": parents,
        "descendants": [_relative(relative) for relative in descendants(workspace.metadata, id)],
    }
    if row.kind == "model":
        details["trained_on"] = _trained_on(workspace, id)
        details["deployments"] = [
            _plain(asdict(entry)) for entry in workspace.metadata.deployments() if entry.model_id == id
        ]
    return details


def _size_problems(workspace: Workspace, id: str) -> list[str]:
    """Returns a line for each file of an artifact that is missing or has another size."""
    try:
        return workspace.artifacts.verify_sizes(id)
    except (UserError, WorkError) as error:
        # Rows alone answer most of the question where a remote store cannot be reached.
        log.warning("%s; the sizes of the files are not compared", error)
        return []


def _trained_on(workspace: Workspace, model: str) -> dict[str, Any] | None:
    """Returns the training set of a model and its records, with their origin; None for a base model."""
    for run in workspace.metadata.producers(model):
        if dataset := run.inputs.get("dataset"):
            names = ["id", "input_id", "completion", "source", "line", "meta"]
            try:
                version = Version.open(workspace.artifacts, dataset)
                columns = [row for table in version.tables(version.splits[0], names) for row in table.to_pylist()]
            except DamagedArtifactError as error:
                log.warning("%s; the records of this training are unknown", error)
                return {"dataset": dataset, "records": []}
            for row in columns:
                row["meta"] = json.loads(row["meta"] or "{}")
            return {"dataset": dataset, "records": columns}
    return None


def _record(workspace: Workspace, text: str) -> dict[str, Any] | None:
    """Looks up a record by its id or its input's: versions that hold or reject its input, and models that saw it."""
    if len(text) < 8 or not all(character in "0123456789abcdef" for character in text):
        return None
    rows = sorted(workspace.metadata.artifacts("dataset"), key=lambda row: row.created_at)
    versions = [(row, Version.open(workspace.artifacts, row.id)) for row in rows]
    # By the input, since a label gives a record another id than it has in the pool.
    if (input_id := _input_id([version for _, version in versions], text)) is None:
        return None
    records: list[dict[str, Any]] = []
    holders: list[dict[str, Any]] = []
    rejected: list[dict[str, Any]] = []
    models: list[str | None] = []
    for row, version in versions:
        for entries, tables in ((holders, version.tables()), (rejected, version.rejected())):
            for record in itertools.chain.from_iterable(_of_input(table, input_id) for table in tables):
                records.append(record)
                rejection = {str(key): record[key] for key in ("step", "reason", "detail") if key in record}
                entries.append({"dataset": row.id, "name": row.meta.get("name"), "id": record["id"], **rejection})
                if entries is holders:
                    models += [run.output for run in workspace.metadata.consumers(row.id) if _is_training(run)]
    # The sets may hold several answers to one input: show one with an answer, of people before a model's pseudo-label,
    # and of these the one that the text names.
    record = max(
        records,
        key=lambda record: (
            bool(record["completion"]),
            not is_pseudo(record["meta"]),
            record["id"].startswith(text),
        ),
    )
    return {
        "type": "record",
        "record": {**record, "meta": json.loads(record["meta"] or "{}")},
        "in": holders,
        "rejected_from": rejected,
        "models": list(dict.fromkeys(model for model in models if model)),
    }


def _of_input(table: pa.Table, input_id: str) -> list[dict[str, Any]]:
    records: list[dict[str, Any]] = table.filter(compute.equal(table["input_id"], input_id)).to_pylist()
    return records


def _input_id(versions: list[Version], text: str) -> str | None:
    """Finds the input of the records whose id, or whose input's id, begins with ``text``; None if there are none."""
    input_ids: set[str] = set()
    for version in versions:
        for table in (*version.tables(columns=["id", "input_id"]), *version.rejected()):
            matches = compute.or_(compute.starts_with(table["id"], text), compute.starts_with(table["input_id"], text))
            input_ids.update(table["input_id"].filter(matches).to_pylist())
    if len(input_ids) > 1:
        raise UserError(f"`{text}` could be records of {len(input_ids)} inputs", fix="give more of the id")
    return input_ids.pop() if input_ids else None


def _is_training(run: Any) -> bool:
    return bool(run.stage == "train" and run.status == "done")


def _round(workspace: Workspace, number: int, config: Config | None) -> dict[str, Any]:
    entry = workspace.metadata.round(number)
    if entry is None:
        raise UserError(f"there is no round {number}", fix="posttrain status")
    runs = [
        {"id": run.id, "stage": run.stage, "status": run.status, "seconds": run.seconds, "output": run.output}
        for run in workspace.metadata.runs(round=number)
    ]
    record = RoundRecord(workspace, entry, RoundState.from_row(entry))
    reports = stage_values(stage_reports(config, record))
    unlabelled = _unlabelled(workspace, record.state)
    return {"type": "round", **_plain(asdict(entry)), "runs": runs, "unlabelled": unlabelled, **reports}


def _unlabelled(workspace: Workspace, state: RoundState) -> dict[str, str]:
    """Returns why records of a round's batch have no label, by their ids."""
    try:
        return read_unlabelled(workspace, state.labelled) if state.labelled else {}
    except DamagedArtifactError as error:
        log.warning("%s; which records were skipped or left is unknown", error)
        return {}


def _relative(relative: Relative) -> dict[str, Any]:
    return {name: _plain(value) for name, value in asdict(relative).items()}


def _plain(value: Any) -> Any:
    """Converts times to ISO text, so that everything can be JSON."""
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    return value.isoformat(timespec="seconds") if isinstance(value, datetime) else value


def ancestors(metadata: Metadata, id: str) -> list[Relative]:
    """Returns the artifact and all that it was made from, nearest first; each once.

    Things outside the store, such as a file that is identified by its digest, stand only in the runs' ``inputs``.
    """

    def parents(artifact_id: str) -> list[str]:
        return [input for run in metadata.producers(artifact_id) for input in run.inputs.values()]

    return _breadth_first(metadata, id, parents)


def descendants(metadata: Metadata, id: str) -> list[Relative]:
    """Returns the artifact and all that was made from it, nearest first; each once."""

    def children(artifact_id: str) -> list[str]:
        return [run.output for run in metadata.consumers(artifact_id) if run.status == "done" and run.output]

    return _breadth_first(metadata, id, children)


def _breadth_first(metadata: Metadata, id: str, step: Callable[[str], Iterable[str]]) -> list[Relative]:
    relatives: list[Relative] = []
    seen = {id}
    level = [id]
    depth = 0
    while level:
        following: list[str] = []
        for artifact_id in level:
            artifact = metadata.artifact(artifact_id)
            if artifact is None:
                continue
            producers = metadata.producers(artifact_id)
            relatives.append(Relative(depth, artifact, producers[0] if producers else None))
            for other in step(artifact_id):
                if other not in seen:
                    seen.add(other)
                    following.append(other)
        level, depth = following, depth + 1
    return relatives


REJECTED = "rejected"
"""Stands for the rejected records in place of a split."""

_COLUMNS = ["id", "prompt", "completion", "rejected", "text", "source", "line", "meta"]
_SEARCHED = ("id", "completion", "rejected", "text", "source", "reason", "detail")


@dataclass(frozen=True)
class RecordPage:
    """A page of records.

    Attributes:
        rows: Rows as dicts with at least ``id, prompt, completion, rejected, text, source, line, meta``; rejected
            records also have ``step, reason, detail``.
        total: Number of all records that match.
        start: Number of records before this page.
    """

    rows: list[dict[str, Any]]
    total: int
    start: int


def search_records(
    version: Version, query: str = "", split: str | None = None, *, start: int = 0, count: int = 50
) -> RecordPage:
    """Returns the records whose texts, answer, file or id contain a text, in reading order.

    Args:
        version: The version.
        query: Text to find, whatever its letter case; "" for all records.
        split: A split of the version, `REJECTED`, or None for all that are kept.
        start: Number of matches to leave out.
        count: Most rows of the page.

    Raises:
        UserError: there is no such split.
    """
    if split not in (None, REJECTED, *version.splits):
        raise UserError(f"the version has no split `{split}`", fix=f"one of {', '.join(version.splits)}")
    rows: list[dict[str, Any]] = []
    total = 0
    for table in _tables(version, split):
        matches = table.filter(_matches(table, query)) if query else table
        if (wanted := count - len(rows)) > 0 and total + matches.num_rows > start:
            rows += matches.slice(max(start - total, 0), wanted).to_pylist()
        total += matches.num_rows
    return RecordPage(rows, total, start)


def _tables(version: Version, split: str | None) -> Iterator[pa.Table]:
    if split == REJECTED:
        yield from version.rejected()
    else:
        yield from version.tables(split, _COLUMNS)


def _matches(table: pa.Table, query: str) -> pa.Array:
    """Returns bool [N]: which rows contain the query in a column or in a turn of their prompt."""
    matches = np.zeros(table.num_rows, bool)
    for name in _SEARCHED:
        if name in table.column_names:
            contained = compute.match_substring(table[name], query, ignore_case=True)
            matches |= compute.fill_null(contained, False).to_numpy()
    start = 0
    for chunk in table["prompt"].chunks:
        content = compute.struct_field(compute.list_flatten(chunk), "content")
        contained = compute.fill_null(compute.match_substring(content, query, ignore_case=True), False)
        rows = compute.list_parent_indices(chunk).to_numpy()
        matches[start + np.unique(rows[contained.to_numpy(zero_copy_only=False)])] = True
        start += len(chunk)
    return pa.array(matches)
