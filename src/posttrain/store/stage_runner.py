"""Runs a stage once: equal inputs, config and seed return the finished artifact instead of repeating the work."""

import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from posttrain.store.artifacts import Artifact
from posttrain.store.errors import (
    DamagedArtifactError,
    StorageError,
    UserError,
    Waiting,
    WorkError,
    is_user_mistake,
)
from posttrain.store.files import disk_errors, make_folder, remove_tree, to_storage_error
from posttrain.store.hashing import digest
from posttrain.store.progress import task_seconds
from posttrain.store.rows import Run
from posttrain.store.workspace import Workspace

log = logging.getLogger("posttrain")

_POLL_SECONDS = 0.5

Work = Callable[[Path, Path], Mapping[str, Any]]

PARTS = "parts"
"""Key of an artifact's meta: ids of other artifacts that it cannot be read without."""


def stage_key(stage: str, version: int, inputs: Mapping[str, str], config: Mapping[str, Any], seed: int) -> str:
    """Hashes everything that a stage's output depends on to 64 hex characters.

    Args:
        version: The stage's version, raised by hand when its meaning changes.
        inputs: Artifact ids (or digests of things outside the store) by their role.
        config: The part of the config that the stage reads, as JSON values.
    """
    key = {"stage": stage, "version": version, "inputs": dict(inputs), "config": dict(config), "seed": seed}
    return digest(key)


def run_stage(
    workspace: Workspace,
    stage: str,
    version: int,
    *,
    kind: str,
    inputs: Mapping[str, str],
    config: Mapping[str, Any],
    seed: int,
    round: int | None,
    work: Work,
) -> Artifact:
    """Returns the stage's artifact: the finished one if the work was done before, else that of ``work(out, scratch)``.

    Args:
        kind: The artifact's kind.
        work: Fills the folder ``out``, may keep state to resume from in ``scratch``, and returns the artifact's
            meta: JSON values that the content decides, as they are part of its id. It lists artifacts that it
            commits itself under `PARTS`: the work is done again if one of those is damaged.

    The other arguments are those of `stage_key`. The run is recorded as done, failed or waiting; ``scratch``
    is removed once the artifact is committed, or when the work ends in a user's mistake.

    Raises:
        MovedWorkspaceError: the workspace is not at its place any more.
        Waiting: ``work`` did; the run is marked waiting.
        UserError: ``work`` did, or the disk refused.
        Exception: whatever else ``work`` raised; the run is marked failed.
    """
    workspace.check_location()
    key = stage_key(stage, version, inputs, config, seed)
    scratch = workspace.scratch / key

    def begin() -> Run:
        return workspace.metadata.start_run(
            stage, key, round=round, seed=seed, config=config, inputs=inputs, worker=workspace.worker
        )

    run = None
    while run is None:
        last = workspace.metadata.finished_run(key)
        if artifact := _find_finished(workspace, stage, key) or _find_sealed(workspace, stage, key):
            remove_tree(scratch)
            return artifact
        run = _begin_alone(workspace, key, last, begin)
    task_seconds.clear()  # of work outside a stage, which belongs to no run
    start = time.monotonic()
    try:
        artifact = _execute(workspace, run, kind, work, scratch, start)
    except Waiting as waiting:
        workspace.metadata.wait_run(run.id, str(waiting), time.monotonic() - start)
        raise
    except BaseException as error:
        if workspace.is_moved():
            # Nothing is recorded: the journal's path may lead into another folder than the database's file.
            remove_tree(scratch)
            raise
        if is_user_mistake(error):
            remove_tree(scratch)  # a mistake must be corrected first, so there is nothing to resume
        _record_failure(workspace, run, error, time.monotonic() - start)
        raise
    remove_tree(scratch)
    return artifact


def find_finished(
    workspace: Workspace, stage: str, version: int, inputs: Mapping[str, str], config: Mapping[str, Any], seed: int
) -> Artifact | None:
    """Returns the artifact of work that was done before; None where it was not, or is damaged. See `stage_key`."""
    return _find_finished(workspace, stage, stage_key(stage, version, inputs, config, seed))


def _begin_alone(workspace: Workspace, key: str, last: Run | None, begin: Callable[[], Run]) -> Run | None:
    """Begins a run; returns None once another process has ended the same work.

    Args:
        last: The finished run that was looked at before; its artifact is missing or damaged.
    """
    with workspace.metadata.lock_runs():
        other = next((run for run in workspace.metadata.running(key) if _is_elsewhere(workspace, run)), None)
        if other is None:
            return begin() if workspace.metadata.finished_run(key) == last else None
    log.info("  %s: another process does the same work; waiting for it", other.stage)
    while other and other.status == "running" and _is_elsewhere(workspace, other):
        time.sleep(_POLL_SECONDS)
        other = workspace.metadata.run(other.id)
    return None


def _is_elsewhere(workspace: Workspace, run: Run) -> bool:
    return run.worker != workspace.worker and not workspace.is_interrupted(run)


def _execute(workspace: Workspace, run: Run, kind: str, work: Work, scratch: Path, start: float) -> Artifact:
    make_folder(scratch)
    with workspace.artifacts.temporary_folder() as out:
        with disk_errors(out):
            meta = work(out, scratch)
        # Libraries make the folders that they write to, and so may have made them where the workspace was.
        workspace.check_location()
        artifact = workspace.artifacts.seal(out, kind, meta)
        seconds = time.monotonic() - start
        # Recorded between sealing and publishing: after a kill behind `publish`, `_find_sealed` takes the artifact over
        # instead of repeating hours of work; after one before it, the id leads to nothing and the work is done again.
        workspace.metadata.seal_run(run.id, artifact.id, seconds)
        workspace.artifacts.publish(out, artifact)
    _record_success(workspace, run, artifact, seconds, task_seconds)
    return artifact


def _record_success(
    workspace: Workspace, run: Run, artifact: Artifact, seconds: float | None, tasks: Mapping[str, float]
) -> None:
    # One transaction: a run is never done without its artifact's row, which `output` refers to.
    with workspace.metadata.transaction():
        workspace.metadata.add_artifact(artifact)
        workspace.metadata.finish_run(run.id, artifact.id, seconds=seconds, detail={"tasks": dict(tasks)})


def _find_finished(workspace: Workspace, stage: str, key: str) -> Artifact | None:
    """Returns the artifact of the finished run under ``key``; None if there is none or it is damaged."""
    run = workspace.metadata.finished_run(key)
    if run is None or run.output is None:
        return None
    try:
        return _verified_artifact(workspace, run.output)
    except DamagedArtifactError as error:
        # Equal inputs give equal bytes: the repeated work publishes over the damaged files, under the same id.
        log.warning("%s: %s; doing the work again", stage, error)
        return None


def _find_sealed(workspace: Workspace, stage: str, key: str) -> Artifact | None:
    """Returns the artifact of a run that was killed between publishing and recording it, and records it."""
    for run in workspace.metadata.sealed_runs(key):
        if run.output is None or not workspace.artifacts.exists(run.output):
            continue
        try:
            artifact = _verified_artifact(workspace, run.output)
        except DamagedArtifactError as error:
            log.warning("%s: %s; doing the work again", stage, error)
            continue
        # The seconds of its tasks died with its process; those counted here are of other work.
        _record_success(workspace, run, artifact, run.seconds, {})
        return artifact
    return None


def _verified_artifact(workspace: Workspace, id: str) -> Artifact:
    """Returns the artifact after verifying its files and those of its parts."""
    artifact = workspace.artifacts.get(id)
    for part in (id, *artifact.meta.get(PARTS, ())):
        workspace.artifacts.path(part)
    return artifact


def _record_failure(workspace: Workspace, run: Run, error: BaseException, seconds: float) -> None:
    try:
        workspace.metadata.fail_run(run.id, f"{type(error).__name__}: {error}", seconds)
    except (UserError, WorkError) as second:
        # A full disk may refuse this too; the next lock marks the run, and the first error is the one shown.
        if not isinstance(error, StorageError) and to_storage_error(error, workspace.home) is None:
            log.warning("the failure could not be recorded: %s", second)
