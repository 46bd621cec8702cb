"""The batch that the loop waits for, as a file that goes out and comes back."""

import logging
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pyarrow as pa

from posttrain.label.file_annotator import export_labels, import_labels
from posttrain.loop.config import Config
from posttrain.loop.context import RoundContext
from posttrain.loop.score_files import chosen_records
from posttrain.loop.stages.label import pool_agreement
from posttrain.loop.state import RoundState
from posttrain.store.errors import DamagedArtifactError, UserError
from posttrain.store.files import check_new_file, disk_errors, write_atomically
from posttrain.store.rows import Run
from posttrain.store.workspace import Workspace

log = logging.getLogger("posttrain")


def export_batch(workspace: Workspace, config: Config, file: Path) -> int:
    """Write the open round's batch to a new CSV file; returns the number of records.

    Raises:
        UserError: if no round waits for labels, or the file exists.
    """
    _, batch, suggestions = _open_batch(workspace, config)
    check_new_file(file)
    write_atomically(file, export_labels(batch, suggestions).encode())
    return int(batch.num_rows)


def import_batch(workspace: Workspace, config: Config, file: Path) -> tuple[int, int]:
    """Check a filled batch and put it where the next run looks for it.

    Returns:
        How many labels are filled in, and how many were asked for.

    Raises:
        UserError: if no round waits for labels, or the file does not fit its batch.
    """
    context, batch, _ = _open_batch(workspace, config)
    if not file.is_file():
        raise UserError("there is no such file", where=str(file))
    answers = import_labels(file, batch, config.task.label_set or None)
    target = workspace.root / "labels" / f"round-{context.number}.csv"
    if file.resolve() != target.resolve():
        with disk_errors(target):
            target.parent.mkdir(exist_ok=True)
        write_atomically(target, file.read_bytes())
    return sum(answer is not None for answer in answers), len(answers)


def label_reports(workspace: Workspace) -> list[dict[str, Any]]:
    """What is known about each round's labels: counts by class and annotator, agreement with the champion.

    ``pool_agreement`` is the share of the whole pool that the champion had right, from the records that were drawn at
    random: value, low, high, drawn; None where there are none, or they cannot be read any more.
    """
    reports = []
    for run in workspace.metadata.runs(stage="label", status="done"):
        row = workspace.metadata.artifact(run.output or "")
        if row is not None:
            reports.append({"round": run.round, **row.meta, "pool_agreement": _pool_agreement(workspace, run)})
    return sorted(reports, key=lambda report: report["round"])


def _pool_agreement(workspace: Workspace, run: Run) -> dict[str, Any] | None:
    try:
        share = pool_agreement(workspace, run.inputs["selection"], str(run.output))
    except DamagedArtifactError as error:
        log.warning("%s; how often the champion was right on the pool is not known", error)
        return None
    return asdict(share) if share else None


def _open_batch(workspace: Workspace, config: Config) -> tuple[RoundContext, pa.Table, list[str] | None]:
    waiting = [entry for entry in workspace.metadata.rounds() if entry.status == "waiting"]
    state = RoundState.of(waiting[-1]) if waiting else RoundState()
    if state.batch is None:
        raise UserError("no round waits for labels", fix="posttrain status")
    context = RoundContext(workspace, config, waiting[-1].number, state=state)
    return context, *chosen_records(context, *map(context.artifact, (state.batch["selection"], state.batch["asked"])))
