"""Restores a whole workspace from a backup."""

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from posttrain.store.artifacts import ArtifactStore, LocalArtifacts, is_artifact_id
from posttrain.store.backup import FILE_NAME, Backup, list_backups
from posttrain.store.backup_repository import BackupRepository
from posttrain.store.config import CONFIG_FILE, StoreConfig
from posttrain.store.database import sqlite_file
from posttrain.store.errors import (
    DamagedArtifactError,
    DamagedDatabaseError,
    EmptyDatabaseError,
    LostDatabaseError,
    UserError,
)
from posttrain.store.files import (
    disk_errors,
    hold_lock,
    make_folder,
    remove_tree,
    sync_file,
    sync_folder,
    sync_tree,
    write_atomically,
)
from posttrain.store.hashing import digest, file_digest
from posttrain.store.journal import Journal, read_journal
from posttrain.store.metadata import Metadata
from posttrain.store.progress import progress_bar
from posttrain.store.rebuild import fill_database, is_healthy, rows_error
from posttrain.store.workers import exclude_workers
from posttrain.store.workspace import JOURNAL, Workspace, database_url, open_artifacts_of

_MARKER = "restoring.json"
"""Says which backup is being restored and into which stores; there until the workspace is whole."""

_OWN = ".posttrain/"


@dataclass(frozen=True)
class RestoreReport:
    """The result of a restore.

    Attributes:
        backup: The backup.
        artifacts: Number of artifacts in the workspace now.
        rows: Number of rows by table.
        files: Number of files besides artifacts.
        database: The database if it held the rows before; None if it was filled.
        replaced: Where the workspace's earlier ``.posttrain`` is now; None if there was none.
        kept: Files outside ``.posttrain`` that differ from the backup's and stayed as they were.
        missing: A line for each thing that the backup lacks.
    """

    backup: Backup
    artifacts: int
    rows: Mapping[str, int]
    files: int
    database: str | None
    replaced: Path | None
    kept: list[str]
    missing: list[str]


def choose_backup(repository: BackupRepository, id: str | None, location: str) -> Backup:
    """Returns the backup whose id begins with ``id``; None: the latest.

    Raises:
        UserError: there is none, or more than one could be meant.
    """
    backups = list_backups(repository)
    if not backups:
        raise UserError("holds no backup", where=location, fix="name a file, folder or URL with backups")
    if id is None:
        names = sorted({backup.workspace for backup in backups})
        if len(names) > 1:
            what = f"holds backups of several workspaces ({', '.join(names)})"
            raise UserError(what, where=location, fix="name one with --backup; --list lists them")
        return backups[-1]
    matches = [backup for backup in backups if backup.id.startswith(id) or backup.id.partition("-")[2].startswith(id)]
    if len(matches) != 1:
        what = f"`{id}` could be {len(matches)} backups" if matches else f"holds no backup `{id}`"
        raise UserError(what, where=location, fix="--list lists them")
    return matches[0]


def restore_backup(
    repository: BackupRepository,
    backup: Backup,
    root: Path,
    read_config: Callable[[], StoreConfig],
    *,
    replace: bool = False,
    attach: bool = False,
) -> RestoreReport:
    """Makes ``root`` the workspace that was backed up; killed, the same call again finishes it.

    Files outside ``.posttrain`` that are there stay as they are.

    Args:
        repository: Where the backup is.
        backup: The backup.
        root: The workspace's folder; it need not exist.
        read_config: Reads the store's config in ``root``; called once its files are there.
        replace: True renames a workspace that is there; it is never removed.
        attach: True takes over a database on a server with the backup's rows, or an artifact store that is in use: the
            workspace that used them is gone.

    Raises:
        UserError: there is a workspace, another process works in it, another workspace may use the database or the
            artifact store, or the disk or the database refused.
        DamagedArtifactError: the backup's own artifact is damaged.
    """
    root = root.absolute()
    home = root / ".posttrain"
    with tempfile.TemporaryDirectory(prefix="posttrain-") as name:
        folder = Path(name)
        # Before anything is changed: the backup itself may be damaged, and a server's database is not renamed.
        repository.copy_to(backup.id, folder)
        if replace and (root / CONFIG_FILE).exists():
            _check_database(home, read_config(), Journal(folder / JOURNAL))
        replaced = _make_room(home, replace=replace)
        make_folder(root)
        with disk_errors(home):
            home.mkdir(mode=0o700, exist_ok=True)
        with exclude_workers(home):
            return _restore(repository, backup, folder, root, read_config, replaced, attach or replaced is not None)


def _restore(
    repository: BackupRepository,
    backup: Backup,
    folder: Path,
    root: Path,
    read_config: Callable[[], StoreConfig],
    replaced: Path | None,
    attach: bool,
) -> RestoreReport:
    home = root / ".posttrain"
    marker = home / _MARKER
    begun = json.loads(marker.read_bytes()) if marker.exists() else {}
    write_atomically(marker, json.dumps({"stores": begun.get("stores"), "backup": backup.id}).encode())
    _remove_unfinished(home)
    with disk_errors(home):
        for name in ("scratch", "tmp"):
            (home / name).mkdir(mode=0o700, exist_ok=True)
    missing = [f"{id}: it was damaged when the backup was made" for id in backup.missing]
    kept, unreadable = _restore_files(repository, backup, folder, root)
    config = read_config()
    artifacts = open_artifacts_of(home, config)
    stores = digest([database_url(home, config), config.artifacts])
    # What a killed restore has begun to fill is its own.
    if not attach and begun != {"stores": stores, "backup": backup.id}:
        _check_unused(home, config, artifacts)
    write_atomically(marker, json.dumps({"stores": stores, "backup": backup.id}).encode())
    if isinstance(artifacts, LocalArtifacts):
        with disk_errors(artifacts.root):
            artifacts.root.mkdir(mode=0o700, parents=True, exist_ok=True)
    with disk_errors(home):
        artifacts.remove_abandoned()  # of a restore that was killed; what it has copied is on the disk afterwards
    missing += [*unreadable, *_restore_artifacts(repository, backup.artifacts, artifacts)]
    if (folder / JOURNAL).exists():
        write_atomically(home / JOURNAL, (folder / JOURNAL).read_bytes())
    rows, database = _restore_database(home, config, artifacts)
    with Workspace(root, Metadata(database_url(home, config), create=True), artifacts) as workspace:
        for arm in workspace.metadata.arms():
            missing += _link_champion(workspace.for_arm(arm))
    # Last of all: until it has written `format.json`, `Workspace.open` finds no workspace.
    Workspace.create(root, config).close()
    marker.unlink()
    count = sum(not problem for problem in map(artifacts.verify_sizes, backup.artifacts))
    return RestoreReport(backup, count, rows, len(backup.files), database, replaced, kept, missing)


def _make_room(home: Path, *, replace: bool) -> Path | None:
    """Refuses a folder that holds a workspace, or renames it.

    Returns:
        The new name of what was renamed.
    """
    # A restore that was killed before it wrote its marker has only locked the folder.
    if not home.exists() or all(path.name.lstrip(".").startswith("lock") for path in home.iterdir()):
        return None
    if (home / _MARKER).exists() and not (home / "format.json").exists():
        return None  # a restore was killed here: the artifacts that it has copied are not copied again
    if not replace:
        fix = "restore into another folder with -w; --replace renames what is there; --damaged mends it"
        raise UserError("there is a workspace already", where=str(home.parent), fix=fix)
    number = 1
    while (target := home.with_name(f"{home.name}.replaced-{number}")).exists():
        number += 1
    with ExitStack() as locks:
        locks.enter_context(exclude_workers(home))
        if (home / "inbox").is_dir():
            # A server that collects would keep writing into the renamed folder.
            locks.enter_context(hold_lock(home / "inbox" / "lock", busy_message="another posttrain collects feedback"))
        with disk_errors(home):
            os.rename(home, target)
    return target


def _remove_unfinished(home: Path) -> None:
    """Removes what a killed restore left, but for artifacts."""
    for path in (*home.glob("store.db*"), home / JOURNAL, *home.glob(".*.json*.*")):
        path.unlink(missing_ok=True)
    for name in ("inbox", "metrics"):
        remove_tree(home / name)


def _restore_files(
    repository: BackupRepository, backup: Backup, folder: Path, root: Path
) -> tuple[list[str], list[str]]:
    """Writes the backup's files.

    Returns:
        The files that differ and stayed, and a line for each that cannot be read.
    """
    kept, missing = [], []
    for name, source in backup.files.items():
        target = root / name
        try:
            with backup_file(repository, folder, source) as path:
                if name.startswith(_OWN) or not target.exists():
                    write_file(path, target)
                elif not target.is_file() or file_digest(target) != file_digest(path):
                    kept.append(name)
        except DamagedArtifactError as error:
            missing.append(f"{name}: {error}")
    return kept, missing


@contextmanager
def backup_file(repository: BackupRepository, folder: Path, source: str) -> Iterator[Path]:
    """Yields a file of the backup.

    Args:
        repository: Where the backup is.
        folder: The files of the backup's artifact.
        source: A name in it, or the id of an artifact.
    """
    if not is_artifact_id(source):
        yield folder / source
        return
    with tempfile.TemporaryDirectory(dir=folder) as copy:
        repository.copy_to(source, Path(copy))
        yield Path(copy, FILE_NAME)


def write_file(source: Path, target: Path) -> None:
    """Copies a file so that a reader of ``target`` sees the old content or the new."""
    make_folder(target.parent)
    # Under another name first: after a kill, a file that is there is whole.
    part = target.with_name(f".{target.name}.part")
    with disk_errors(target):
        shutil.copyfile(source, part)
        sync_file(part)
        os.replace(part, target)
        sync_folder(target.parent)


def _restore_artifacts(repository: BackupRepository, ids: Iterable[str], artifacts: ArtifactStore) -> list[str]:
    """Copies artifacts that the workspace lacks; returns a line for each that cannot be read."""
    missing, ids = [], list(ids)
    with progress_bar("restoring", len(ids), "artifacts") as advance:
        for id in ids:
            if artifacts.verify_sizes(id):
                try:
                    restore_artifact(repository, id, artifacts)
                except DamagedArtifactError as error:
                    missing.append(str(error))
            advance(1)
    return missing


def restore_artifact(repository: BackupRepository, id: str, artifacts: ArtifactStore) -> None:
    """Copies an artifact of a repository into the store; a damaged one there is replaced."""
    with artifacts.temporary_folder() as folder:
        repository.copy_to(id, folder)
        sync_tree(folder)
        artifacts.publish(folder, repository.get(id))


def _restore_database(
    home: Path, config: StoreConfig, artifacts: ArtifactStore
) -> tuple[Mapping[str, int], str | None]:
    """Fills the database from the journal.

    Returns:
        The number of rows by table, and the database if it held them before.
    """
    url, journal = database_url(home, config), Journal(home / JOURNAL)
    content = read_journal(journal.path)
    if not content.entries:
        return {}, None
    # With another number it has changes that the journal lacks.
    position, location = _database_position(url)
    if position == content.last and is_healthy(url, journal, artifacts):
        rows = {table: len(rows) for table, rows in content.rows(content.last).items()}
        return rows, None if _is_own(url, home) else location
    # What it does not know is the `meta` of artifacts that are missing, which has a line of its own.
    return fill_database(url, content, artifacts).rows, None


def _check_database(home: Path, config: StoreConfig, journal: Journal) -> None:
    """Refuses a database that stays where it is, such as a server's, and has other changes than the journal.

    Raises:
        UserError: it has.
    """
    url = database_url(home, config)
    position, location = _database_position(url)
    if not _is_own(url, home) and position not in (None, 0, read_journal(journal.path).last):
        raise rows_error(location)


def _check_unused(home: Path, config: StoreConfig, artifacts: ArtifactStore) -> None:
    """Refuses a database or an artifact store outside ``home`` that holds something.

    Raises:
        UserError: it does: two workspaces would write to it, and ``data gc`` of one remove artifacts of the other.
    """
    url = database_url(home, config)
    position, location = _database_position(url)
    if _is_own(url, home) or position in (None, 0):
        if isinstance(artifacts, LocalArtifacts) or not artifacts.ids():
            return
        location = str(config.artifacts)
    fix = f"name other ones in `store` of {home.parent / CONFIG_FILE} and repeat; --attach if that workspace is gone"
    what = "holds rows or artifacts: the workspace that uses it and the restored one would both write there"
    raise UserError(what, where=location, fix=fix)


def _database_position(url: str) -> tuple[int | None, str]:
    """Returns the number of a database's last transaction, None if there is no usable one, and where it is."""
    try:
        with closing(Metadata(url, write=False)) as metadata:
            return metadata.position(), metadata.location
    except (EmptyDatabaseError, LostDatabaseError, DamagedDatabaseError):
        return None, ""


def _is_own(url: str, home: Path) -> bool:
    """Returns whether the database is a file in ``home``."""
    file = sqlite_file(url)
    return file is not None and file.is_relative_to(home)


def _link_champion(workspace: Workspace) -> list[str]:
    """Links a loop's champion; returns a line if its model is not whole."""
    deployments = workspace.metadata.deployments()
    try:
        if deployments:
            workspace.link_champion(deployments[-1].model_id)
    except DamagedArtifactError as error:
        return [f"champion: {error}"]
    return []
