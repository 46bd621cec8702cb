"""Reports on the labels of rounds: counts, the champion's agreement, and how a batch differs from the pool."""

import logging
from collections import Counter
from dataclasses import asdict
from typing import Any

import pyarrow.parquet as parquet

from posttrain.loop.score_files import BATCH, SCORES
from posttrain.loop.stages.label import pool_agreement
from posttrain.loop.stages.suggest import check_report
from posttrain.store.errors import DamagedArtifactError
from posttrain.store.rows import Run
from posttrain.store.workspace import Workspace

log = logging.getLogger("posttrain")


def batch_shift(workspace: Workspace, selection: str) -> dict[str, Any] | None:
    """Compares the labels that the champion predicts in the batch with those that it predicts in the pool.

    Returns:
        ``psi``, the population stability index, its ``p_value``, and the ``label`` whose share differs most, with its
        shares of ``batch`` and ``pool``; None before the champion's first training, and without a closed label set.
    """
    # Only here: it imports scipy's statistics.
    from posttrain.label.quality.findings import compare_counts

    scores = workspace.artifacts.path(workspace.metadata.producers(selection)[-1].inputs["scores"]) / SCORES
    if "probabilities" not in parquet.read_schema(scores).names:
        return None
    chosen = parquet.read_table(workspace.artifacts.path(selection) / BATCH, columns=["predicted"])
    pool, batch = (
        Counter(table["predicted"].drop_null().to_pylist())
        for table in (parquet.read_table(scores, columns=["predicted"]), chosen)
    )
    names = sorted({*pool, *batch})
    shift = compare_counts([pool[name] for name in names], [batch[name] for name in names], names)
    if shift.largest is None:
        return None
    label, before, after = shift.largest
    return {"psi": shift.psi, "p_value": shift.p_value, "label": label, "batch": after, "pool": before}


def label_reports(workspace: Workspace) -> list[dict[str, Any]]:
    """Reports on each round's labels: counts by class and annotator, agreement with the champion.

    ``pool_agreement`` is the share of the whole pool that the champion labelled right, estimated from the records that
    were drawn at random: value, low, high, drawn; None where there are none, or they cannot be read any more.
    ``shift`` is how the batch differs from the pool, see `batch_shift`; the selection intends that it does.
    ``models`` is what a model suggested and what was accepted without people, see
    `posttrain.loop.stages.suggest.check_report`.
    """
    reports = []
    for run in workspace.metadata.runs(stage="label", status="done"):
        row = workspace.metadata.artifact(run.output or "")
        if row is not None:
            report = {"round": run.round, **row.meta, "pool_agreement": _pool_agreement(workspace, run)}
            reports.append({**report, "shift": _shift(workspace, run), "models": _models_part(workspace, run)})
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


def _shift(workspace: Workspace, run: Run) -> dict[str, Any] | None:
    try:
        return batch_shift(workspace, run.inputs["selection"])
    except DamagedArtifactError as error:
        log.warning("%s; how the batch differs from the pool is unknown", error)
        return None
