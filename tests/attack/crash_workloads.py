"""Work on a workspace that power cuts interrupt, and checks of what they must not undo."""

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from crash_files import check_checkpoints, check_feedback, check_scores, checkpoints, feedback, scores
from crash_states import promised
from crash_work import Log, Workload
from file_layer import Promise

from posttrain.inspect.verify import verify
from posttrain.loop.model_registry import ModelRegistry
from posttrain.store.backup import create_backup, list_backups
from posttrain.store.backup_repository import create_repository, open_repository
from posttrain.store.config import StoreConfig
from posttrain.store.errors import UserError
from posttrain.store.files import remove_tree, write_atomically
from posttrain.store.rebuild import rebuild_database
from posttrain.store.restore import choose_backup, restore_backup
from posttrain.store.stage_runner import run_stage
from posttrain.store.workspace import Workspace


def stages(folder: Path, log: Log) -> Any:
    """Runs three stages, each on the output of the one before; the last keeps state and commits a part of its own."""
    with Workspace.create(folder / "work") as store, store.lock():
        log.promise("created")
        ids = run_stages(store, log)
        return {"ids": ids, "artifacts": [row.id for row in store.metadata.artifacts()], "left": _left(store)}


def run_stages(store: Workspace, log: Log, kind: str = "dataset") -> list[str]:
    ids: list[str] = []
    for number in range(3):

        def work(out: Path, scratch: Path, number: int = number) -> Mapping[str, Any]:
            log.executed.append(f"stage {number}")
            draw = random.Random(number)
            (out / "inner" / "deep").mkdir(parents=True)
            (out / "rows.bin").write_bytes(draw.randbytes(1700))
            (out / "inner" / "deep" / "text").write_text(f"stage {number}")
            (out / "inner" / "empty").write_bytes(b"")
            if number < 2:
                return {"number": number}
            state = scratch / "state.json"
            if state.exists():
                assert json.loads(state.read_bytes()) == list(range(300))
            write_atomically(state, json.dumps(list(range(300))).encode())
            with store.artifacts.temporary_folder() as inner:
                (inner / "part.bin").write_bytes(draw.randbytes(600))
                part = store.artifacts.commit(inner, "part", {})
            store.metadata.add_artifact(part)
            return {"parts": [part.id]}

        inputs = {"previous": ids[-1]} if ids else {}
        stage = run_stage(
            store, f"stage{number}", 1, kind=kind, inputs=inputs, config={}, seed=0, round=None, work=work
        )
        log.promise("done", f"stage {number}")
        ids.append(stage.id)
    return ids


def _left(store: Workspace) -> list[str]:
    folders = (store.home / "tmp", store.home / "scratch", store.home / "artifacts" / ".tmp")
    return [path.name for folder in folders if folder.is_dir() for path in folder.iterdir()]


def check_workspace(folder: Path, promises: Sequence[Promise]) -> Iterator[str]:
    root = folder / "work"
    try:
        findings = verify(root, StoreConfig()).findings
    except UserError as error:
        if promised(promises, "created"):
            yield f"verify: {error}"
        return
    # The registry's row comes before the link, which the next run mends, as the finding says.
    is_behind = promised(promises, "in service") != promised(promises, "deploying")
    for finding in findings:
        if not (is_behind and "/champion" in finding.where):
            yield f"verify: {finding.line}"
    if promised(promises, "created"):
        with Workspace.open(root) as store, store.lock():
            for row in store.metadata.artifacts():
                store.artifacts.path(row.id)


def check_done(folder: Path) -> Iterator[str]:
    """Checks a workspace after the work was done again."""
    for finding in verify(folder / "work", StoreConfig()).findings:
        yield f"verify after the run: {finding.line}"


def prepare_damage(folder: Path) -> None:
    """Damages the first stage's artifact."""
    ids = stages(folder, Log())["ids"]
    path = folder / "work" / ".posttrain" / "artifacts" / ids[0] / "rows.bin"
    path.chmod(0o644)
    path.write_bytes(b"damaged")


def check_damaged(folder: Path, promises: Sequence[Promise]) -> Iterator[str]:
    if promised(promises, "done"):
        yield from check_workspace(folder, promises)
    else:
        with Workspace.open(folder / "work") as store, store.lock():
            pass


def prepare_loss(folder: Path) -> None:
    """Removes the database."""
    stages(folder, Log())
    for path in (folder / "work" / ".posttrain").glob("store.db*"):
        path.unlink()


def rebuild(folder: Path, log: Log) -> Any:
    rebuild_database(folder / "work", StoreConfig())
    log.promise("created")
    for number in range(3):
        log.promise("done", f"stage {number}")
    return stages(folder, log)


def check_rebuilt(folder: Path, promises: Sequence[Promise]) -> Iterator[str]:
    if promised(promises, "created"):
        yield from check_workspace(folder, promises)


def champions(folder: Path, log: Log) -> Any:
    """Promotes three models in turn, and rolls the last one back."""
    with Workspace.create(folder / "work") as store, store.lock():
        log.promise("created")
        models = run_stages(store, log, kind="model")
        registry = ModelRegistry(store)
        registry.sync()
        for number in range(len(store.metadata.deployments()), 4):
            log.promise("deploying", number)
            if number < 3:
                registry.promote(models[number], round=number, action="promote" if number else "baseline")
            else:
                registry.rollback(reason="test")
            log.promise("in service", number)
        rows = [(models.index(row.model_id), row.action) for row in store.metadata.deployments()]
        champion = store.champion_path.resolve().name == models[1]
        return {"deployments": rows, "champion": champion, "left": _left(store)}


def check_champions(folder: Path, promises: Sequence[Promise]) -> Iterator[str]:
    in_service = promised(promises, "in service")
    if in_service:
        with Workspace.open(folder / "work", write=False) as store:
            rows = store.metadata.deployments()
            if len(rows) <= in_service[-1]:
                yield f"deployment {in_service[-1]} is lost: {len(rows)} rows"
            path = store.champion_path
            names = [row.model_id for row in rows[in_service[-1] :]]
            if not path.exists() or path.resolve().name not in names:
                yield f"the champion's link leads to {path.resolve().name} instead of one of {names}"
    yield from check_workspace(folder, promises)
    if in_service:
        with Workspace.open(folder / "work") as store, store.lock():
            registry = ModelRegistry(store)
            registry.sync()
            if store.champion_path.resolve().name != registry.champion_id:
                yield "the champion's link is wrong after `sync`"
        for finding in verify(folder / "work", StoreConfig()).findings:
            yield f"verify after `sync`: {finding.line}"


def backup(folder: Path, log: Log) -> Any:
    """Backs up a workspace into a folder."""
    stages(folder, log)
    with Workspace.open(folder / "work") as store, create_repository(f"{folder}/backups/", store.home) as repository:
        log.promise("backed up", create_backup(store, repository).id)
        ids = [len(backup.artifacts) for backup in list_backups(repository)]
        return {"artifacts": set(ids)}


def stages_before(folder: Path) -> None:
    """Makes the workspace."""
    stages(folder, Log())


def check_backups(folder: Path, promises: Sequence[Promise]) -> Iterator[str]:
    ids = promised(promises, "backed up")
    if (folder / "backups").is_dir():
        with open_repository(str(folder / "backups"), folder) as repository:
            backups = list_backups(repository)
            if lost := set(ids) - {backup.id for backup in backups}:
                yield f"backups {lost} are lost"
            for backup in backups:
                for id in (backup.id, *backup.artifacts):
                    for problem in repository.verify(id):
                        yield f"{backup.id}: {id}: {problem}"
    elif ids:
        yield "the backups are lost"
    yield from check_workspace(folder, promises)


def prepare_restore(folder: Path) -> None:
    """Backs a workspace up, and removes it."""
    backup(folder, Log())
    remove_tree(folder / "work")


def restore(folder: Path, log: Log) -> Any:
    """Restores the backup, and finds all stages done."""
    with open_repository(str(folder / "backups"), folder) as repository:
        try:
            restore_backup(repository, choose_backup(repository, None, ""), folder / "work", StoreConfig)
            log.promise("created")
            for number in range(3):
                log.promise("done", f"stage {number}")
        except UserError as error:
            if "there is a workspace already" not in str(error):
                raise
    return stages(folder, log)


WORKLOADS = {
    "stages": Workload(stages, check_workspace),
    "damaged artifact": Workload(stages, check_damaged, prepare_damage),
    "champion": Workload(champions, check_champions),
    "rebuild": Workload(rebuild, check_rebuilt, prepare_loss),
    "backup": Workload(backup, check_backups, stages_before),
    "restore": Workload(restore, check_rebuilt, prepare_restore),
    "feedback": Workload(feedback, check_feedback),
    "checkpoints": Workload(checkpoints, check_checkpoints),
    "scores": Workload(scores, check_scores),
}
