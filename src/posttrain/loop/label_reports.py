"""Reports on the labels of rounds: counts, and the champion's agreement."""

import logging
from dataclasses import asdict
from typing import Any

from posttrain.loop.stages.label import pool_agreement
from posttrain.loop.stages.suggest import check_report
from posttrain.store.errors import DamagedArtifactError
from posttrain.store.rows import Run
from posttrain.store.workspace import Workspace

log = logging.getLogger("posttrain")


def label_reports(workspace: Workspace) -> list[dict[str, Any]]:
    """Reports on each round's labels: counts by class and annotator, agreement with the champion.

    ``pool_agreement`` is the share of the whole pool that the champion labelled right, estimated from the records that
    were drawn at random: value, low, high, drawn; None where there are none, or they cannot be read any more.
    ``models`` is what a model suggested and what was accepted without people, see
    `posttrain.loop.stages.suggest.check_report`.
    """
    reports = []
    for run in workspace.metadata.runs(stage="label", status="done"):
        row = workspace.metadata.artifact(run.output or "")
        if row is not None:
            report = {"round": run.round, **row.meta, "pool_agreement": _pool_agreement(workspace, run)}
            reports.append({**report, "models": _models_part(workspace, run)})
    return sorted(reports, key=lambda report: report["round"])


def _models_part(workspace: Workspace, run: Run) -> dict[str, Any] | None:
    """Returns the counts of a model's labels in a round and of their checks by people; None where there are none."""
    if "suggestions" not in run.inputs:
        return None
    try:
        return check_report(workspace, run.inputs["suggestions"], str(run.output))
    except DamagedArtifactError as error:
        log.warning("%s; what models labelled is unknown", error)
        return None


def _pool_agreement(workspace: Workspace, run: Run) -> dict[str, Any] | None:
    try:
        share = pool_agreement(workspace, run.inputs["selection"], str(run.output))
    except DamagedArtifactError as error:
        log.warning("%s; how often the champion was right on the pool is unknown", error)
        return None
    return asdict(share) if share else None
