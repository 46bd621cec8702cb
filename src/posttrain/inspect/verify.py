"""Verifies a workspace: everything that is stored against its checksums, its journal and what it was made from."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from posttrain.data.feedback.segment import count_entries, inbox_problems
from posttrain.inspect.champion import MEND, champion_problems
from posttrain.loop.stages.decide import DECISION
from posttrain.loop.state import RoundState
from posttrain.select.scores.passes import chunk_problem
from posttrain.store.artifacts import LocalArtifacts
from posttrain.store.config import StoreConfig
from posttrain.store.database import RECOVER, sqlite_file
from posttrain.store.errors import DamagedArtifactError, EmptyDatabaseError, LostDatabaseError, UserError, WorkError
from posttrain.store.journal import Journal
from posttrain.store.rows import ArtifactRow
from posttrain.store.verify import Finding, database_finding, verify_artifacts, verify_database
from posttrain.store.workspace import JOURNAL, Workspace, database_url, describe_work, open_artifacts_of

_UNREADABLE_ROW = (ValueError, TypeError, KeyError, AttributeError, LookupError)


@dataclass(frozen=True)
class Verification:
    """The result of a verification.

    Attributes:
        findings: All damage; empty for a healthy workspace.
        checked: Numbers of artifacts, bytes, rows, score chunks and feedback entries that were verified.
    """

    findings: list[Finding]
    checked: Mapping[str, int]


def verify(root: Path, config: StoreConfig, *, quick: bool = False) -> Verification:
    """Verifies the workspace in ``root``; changes nothing.

    Args:
        root: The workspace's folder.
        config: Where its store is.
        quick: True compares sizes and reads no large file.

    Raises:
        UserError: there is no workspace, or its database or artifact store refuses.
    """
    home = root.absolute() / ".posttrain"
    artifacts = open_artifacts_of(home, config)
    if not (home / "format.json").exists():
        if not home.is_dir() or describe_work(Journal(home / JOURNAL), artifacts) is None:
            raise UserError("nothing is stored here yet", where=str(root), fix=f"posttrain run -w {root}")
        finding = Finding(str(home / "format.json"), "is missing", f"posttrain run -w {root} writes it again")
        return Verification([finding], {})
    try:
        workspace = Workspace.open(root, config, write=False)
    except (EmptyDatabaseError, LostDatabaseError, WorkError) as error:
        url = database_url(home, config)
        lost = database_finding(str(sqlite_file(url) or "store.database"), error)
        return Verification([lost, *verify_artifacts(artifacts, {}, quick=quick)], {})
    with workspace:
        return _verify(workspace, quick=quick)


def _verify(workspace: Workspace, *, quick: bool) -> Verification:
    metadata, home = workspace.metadata, workspace.home
    findings = verify_database(metadata, Journal(home / JOURNAL), quick=quick)
    rows: dict[str, ArtifactRow] = {}
    of_loops: list[Finding] = []
    champions: set[str] = set()
    try:
        rows = {row.id: row for row in metadata.artifacts()}
        loops = [workspace.for_arm(arm) for arm in metadata.arms()]
        champions = {loop.metadata.deployments()[-1].model_id for loop in loops if loop.metadata.deployments()}
        for loop in loops:
            of_loops += [*_verify_rounds(loop, rows), *_verify_champion(loop, quick=quick)]
        count = sum(metadata.count_rows().values())
    except (*_UNREADABLE_ROW, WorkError):
        # Rows that cannot be read are findings already; without one of those it is a defect of ours.
        if not findings:
            raise
        count = 0
    for finding in verify_artifacts(workspace.artifacts, rows, quick=quick):
        findings.append(replace(finding, fix=MEND) if finding.where in champions else finding)
    findings += of_loops
    chunks = sorted(home.glob("scores*/*/*/*.chunk"))
    if not quick:
        scored_again = "the next run removes the file and scores its records again"
        findings += [Finding(str(path), what, scored_again) for path in chunks if (what := chunk_problem(path))]
    lost = "posttrain restore BACKUP --damaged; the entries of intact lines are not affected"
    findings += [Finding(str(path), what, lost) for path, what in inbox_problems(home / "inbox", quick=quick)]
    checked = {
        "artifacts": len(rows),
        "bytes": sum(row.size for row in rows.values()),
        "rows": count,
        "score_chunks": 0 if quick else len(chunks),
        "feedback_entries": 0 if quick else count_entries(home / "inbox"),
    }
    return Verification(findings, checked)


def _verify_rounds(workspace: Workspace, rows: Mapping[str, ArtifactRow]) -> Iterator[Finding]:
    """Compares the rounds' numbers and models with the artifacts that they were read from."""
    for row in workspace.metadata.rounds():
        name = " ".join(filter(None, (f"round {row.number}", workspace.metadata.arm)))
        state = RoundState.from_row(row)
        for model in (state.champion, state.candidate):
            if model is not None and model not in rows:
                yield Finding(name, f"{model} is not in the database", RECOVER)
        if state.evaluation is not None:
            yield from _differences(f"{name}, metrics", state.metrics or {}, _metrics(workspace, state.evaluation))
        if state.final is not None:
            metrics = _metrics(workspace, state.final["evaluation"])
            yield from _differences(f"{name}, final metrics", state.final["metrics"], metrics)
        if state.decision and "id" in state.decision:
            record = _Source(state.decision["id"], _decision(workspace, state.decision["id"]))
            yield from _differences(f"{name}, decision", state.decision, record)
            # The latency is in no evaluation.
            judged = _Source(record.id, record.values.get("metrics", {}).get("candidate", {}))
            yield from _differences(f"{name}, metrics", state.metrics or {}, judged)
    for deployment in workspace.metadata.deployments():
        if deployment.model_id not in rows:
            yield Finding(f"deployment {deployment.id}", f"{deployment.model_id} is not in the database", RECOVER)


@dataclass(frozen=True)
class _Source:
    """An artifact's values; none if it is damaged, which is a finding of its own."""

    id: str
    values: Mapping[str, Any]


def _differences(where: str, present: Mapping[str, Any], source: _Source) -> Iterator[Finding]:
    for name, value in source.values.items():
        if name not in present:
            yield Finding(where, f"`{name}` is missing, and {_short(value)} in {source.id}", RECOVER)
        elif present[name] != value:
            yield Finding(where, f"`{name}` is {_short(present[name])}, but {_short(value)} in {source.id}", RECOVER)


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else "other"


def _metrics(workspace: Workspace, evaluation: str) -> _Source:
    try:
        return _Source(evaluation, workspace.artifacts.get(evaluation).meta["metrics"])
    except DamagedArtifactError:
        return _Source(evaluation, {})


def _decision(workspace: Workspace, id: str) -> Mapping[str, Any]:
    try:
        record: dict[str, Any] = json.loads((workspace.artifacts.path(id) / DECISION).read_text(encoding="utf-8"))
    except DamagedArtifactError:
        return {}
    # A rollback becomes a refusal where there is no earlier champion.
    return {name: value for name, value in record.items() if name != "action"}


def _verify_champion(workspace: Workspace, *, quick: bool) -> Iterator[Finding]:
    """Checks that the champion's link leads to the model that the registry names, whole."""
    deployments, path = workspace.metadata.deployments(), workspace.champion_path
    if not deployments:
        if path.is_symlink() or path.exists():
            yield Finding(str(path), "leads to a model, and the registry has no champion", RECOVER)
        return
    model, artifacts = deployments[-1].model_id, workspace.artifacts
    if isinstance(artifacts, LocalArtifacts) and path.resolve() == (artifacts.root / model).resolve():
        return  # verified with all artifacts
    fix = "posttrain run mends the link if the model's artifact is whole"
    for problem in champion_problems(workspace, model, checksums=not quick):
        yield Finding(str(path), problem, fix)
