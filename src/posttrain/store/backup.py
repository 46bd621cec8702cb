"""Backs a workspace up: its artifacts, rows, feedback and files as they are at one moment, while the loop runs.

A repository (`posttrain.store.backup_repository`) holds artifacts only. Each backup is an artifact itself, with the
rows and the small files; it names the workspace's artifacts and large files, which backups share. So another backup
to the same repository copies only what is new.
"""

import glob
import itertools
import logging
import os
import shutil
import tempfile
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from itertools import chain
from pathlib import Path, PurePosixPath
from typing import Any

from sqlalchemy import text

from posttrain import __version__
from posttrain.store.artifacts import Artifact, FileEntry, is_artifact_id, parse_manifest
from posttrain.store.backup_repository import BackupRepository
from posttrain.store.config import CONFIG_FILE
from posttrain.store.database import utc_now
from posttrain.store.errors import DamagedArtifactError, WorkError
from posttrain.store.extensions import is_dotted_path
from posttrain.store.files import disk_errors, temporary_folder
from posttrain.store.hashing import file_digest
from posttrain.store.journal import Journal, Rows
from posttrain.store.journaled_database import JOURNALED, JournaledDatabase, read_rows
from posttrain.store.progress import progress_bar
from posttrain.store.tables import artifacts as artifact_table
from posttrain.store.workspace import JOURNAL, Workspace
from posttrain.store.yaml_files import read_yaml

log = logging.getLogger("posttrain")

KIND = "backup"

FILE_NAME = "content"

_FILE_KIND = "file"

# Of `.posttrain`, besides the artifacts: what nothing else holds. Scores, scratch folders and copies of remote
# artifacts are computed or downloaded again. Replies of endpoints were paid for.
_FOLDERS = ("inbox/segments", "inbox/records", "inbox/rejected", "metrics", "replies")

_MARKS = "inbox/segments/*.taken"

_SEGMENTS = ".posttrain/inbox/segments/"

_SHARED_BYTES = 1 << 20
"""Size from which a file is an artifact of its own, which the next backup need not copy again."""

_ATTEMPTS = 5


@dataclass(frozen=True)
class BackupReport:
    """The content of a backup.

    Attributes:
        id: Of the backup's artifact.
        artifacts: Number of artifacts in it.
        size: Their bytes.
        copied: Number of artifacts, and of large files, that the repository did not have.
        copied_size: Their bytes.
        rows: Number of rows of the database.
        files: Number of files besides artifacts.
        damaged: A line for each artifact that is damaged in the workspace; in the backup only if the repository had it.
    """

    id: str
    artifacts: int
    size: int
    copied: int
    copied_size: int
    rows: int
    files: int
    damaged: list[str]


@dataclass
class _Copies:
    """Counts what was copied to the repository."""

    artifacts: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    damaged: list[str] = field(default_factory=list)
    count: int = 0
    size: int = 0

    def add(self, size: int) -> None:
        self.count += 1
        self.size += size


class _RemovedArtifactError(Exception):
    """An artifact was removed after its row was read."""


def create_backup(workspace: Workspace, repository: BackupRepository) -> BackupReport:
    """Writes a backup; other processes may work meanwhile.

    Raises:
        UserError: the repository cannot be written to.
        WorkError: artifacts are being removed all the time.
    """
    home = workspace.home
    # A mark says that a dataset version holds a segment's records, so marks are read before the rows: one that came
    # later could be about a version that is not in the backup. The segments themselves come after the rows.
    marks = sorted(home.glob(_MARKS))
    for _ in range(_ATTEMPTS):
        position, rows = _read_rows(workspace.metadata)
        try:
            copies = _copy_artifacts(workspace, repository, rows)
            break
        except _RemovedArtifactError:
            continue  # `posttrain data gc` has run since: its rows have changed too
    else:
        raise WorkError(f"{workspace.root}: artifacts are removed all the time; back up when nothing else runs")
    with _staging_folder(workspace) as folder:
        if row_count := sum(map(len, rows.values())):
            changes = [(table.name, list(key), row) for table in JOURNALED for key, row in rows[table.name].items()]
            Journal(folder / JOURNAL).append(max(position, 1), changes, snapshot=True)
        names = _copy_files(
            workspace, repository, folder, chain(_home_files(home, marks), _named_files(workspace.root)), copies
        )
        meta = {
            "created_at": utc_now().isoformat(),
            "workspace": workspace.root.name,
            "version": __version__,
            "artifacts": copies.artifacts,
            "missing": copies.missing,
            "files": names,
            "rows": row_count,
        }
        # Last of all: until it is there, the repository has no such backup.
        backup = workspace.artifacts.seal(folder, KIND, meta)
        repository.add_copy(folder, backup)
    size = sum(int(rows[artifact_table.name][id,]["size"]) for id in copies.artifacts)
    count = len(copies.artifacts)
    return BackupReport(backup.id, count, size, copies.count, copies.size, row_count, len(names), copies.damaged)


def _read_rows(database: JournaledDatabase) -> tuple[int, Rows]:
    """Reads the number of the last transaction and all rows, as they are at one moment."""
    with database.reading() as connection:
        if connection.dialect.name == "postgresql":
            # SQLite's transactions see one moment anyway; PostgreSQL's would see another with each query.
            connection.execute(text("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ"))
        return database.position(), {table.name: read_rows(connection, table) for table in JOURNALED}


def _copy_artifacts(workspace: Workspace, repository: BackupRepository, rows: Rows) -> _Copies:
    copies = _Copies()
    ids = sorted(id for (id,) in rows[artifact_table.name])
    with progress_bar("backing up", len(ids), "artifacts") as advance:
        for id in ids:
            if repository.verify_sizes(id):
                _copy_artifact(workspace, repository, id, copies)
            else:
                copies.artifacts.append(id)
            advance(1)
    return copies


def _copy_artifact(workspace: Workspace, repository: BackupRepository, id: str, copies: _Copies) -> None:
    try:
        folder = workspace.artifacts.path(id)
        artifact = workspace.artifacts.get(id)
        repository.add_copy(folder, artifact)
    except (DamagedArtifactError, FileNotFoundError) as error:
        if workspace.metadata.artifact(id) is None:
            raise _RemovedArtifactError from None
        copies.missing.append(id)
        copies.damaged.append(str(error))
    else:
        copies.artifacts.append(id)
        copies.add(artifact.size)


def _home_files(home: Path, marks: Sequence[Path]) -> Iterator[Path]:
    """Yields the marks, and the other files of `_FOLDERS` as they are when their turn comes."""
    yield from marks
    yielded: set[Path] = set()
    # Twice, as a segment that is sealed, and so renamed, after the first listing is only in the second.
    for _ in range(2):
        for folder in _FOLDERS:
            for path in sorted((home / folder).rglob("*")):
                if path.is_file() and path.suffix != ".taken" and path not in yielded:
                    yielded.add(path)
                    yield path


def _named_files(root: Path) -> Iterator[Path]:
    """Yields the config, the files that it names, those that posttrain writes next to it, and modules of the user."""
    config = root / CONFIG_FILE
    texts = list(_texts(read_yaml(config))) if config.is_file() else []
    # Of `package.module:Name`, the package; another one is in the workspace if it has an `__init__.py`.
    packages = {text.partition(":")[0].partition(".")[0] for text in texts if is_dotted_path(text)}
    packages |= {path.parent.name for path in root.glob("*/__init__.py")}
    names = [CONFIG_FILE, "labels", "data/pool", "data/labelled", *texts, "*.py"]
    names += [f"{package}/**/*.py" for package in sorted(packages)]
    paths: dict[Path, None] = {}
    for name in names:
        for match in _matches(root, name):
            inner = sorted(match.rglob("*")) if match.is_dir() else [match]
            paths |= dict.fromkeys(path for path in inner if not _is_hidden(path.relative_to(match)))
    for path in paths:
        if path.is_file():
            yield path


def _matches(root: Path, name: str) -> list[Path]:
    """Returns the paths below ``root``, outside `.posttrain`, that a text of the config names, itself or as a glob."""
    # A text of the config may be anything: what is not a path, or leads elsewhere, matches nothing.
    if "\x00" in name:
        return []
    path = os.path.normpath(os.path.join(root, os.path.expanduser(name)))
    if not path.startswith(f"{root}{os.sep}") or path.startswith(f"{root}{os.sep}.posttrain"):
        return []
    if os.path.exists(path):
        return [Path(path)]
    matches = glob.glob(os.path.relpath(path, root), root_dir=root, recursive=True)
    # A pattern such as `.*` may be a rule about texts.
    return [root / match for match in sorted(matches) if not _is_hidden(Path(match))]


def _is_hidden(path: Path) -> bool:
    """Returns whether a path within a folder belongs to something else than the user, such as Git or Python."""
    return any(part.startswith(".") or part == "__pycache__" for part in path.parts)


def _texts(value: Any) -> Iterator[str]:
    """Yields every text in a tree of JSON values."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _texts(inner)


def _copy_files(
    workspace: Workspace, repository: BackupRepository, folder: Path, paths: Iterable[Path], copies: _Copies
) -> dict[str, str]:
    """Copies small files into the backup's folder, and large ones as artifacts to the repository.

    Returns:
        The file's name in the folder, or its artifact's id, by its path relative to the workspace.
    """
    names: dict[str, str] = {}
    for path in paths:
        relative = path.relative_to(workspace.root).as_posix()
        # By numbers, as a name that this disk allows may be impossible on the repository's.
        name = f"files/{len(names)}"
        try:
            with disk_errors(folder):
                if path.stat().st_size < _SHARED_BYTES:
                    (folder / "files").mkdir(exist_ok=True)
                    shutil.copyfile(path, folder / name)
                else:
                    name = _copy_large_file(workspace, repository, path, copies)
        except FileNotFoundError:
            continue  # removed or renamed since it was listed
        names[relative] = name
    left_out = segments_to_leave_out(names)
    return {path: name for path, name in names.items() if path not in left_out}


def segments_to_leave_out(paths: Collection[str]) -> set[str]:
    """Returns the segments of the inbox that a copy has to do without, as they were sealed while it was made.

    A segment that was sealed between the two listings is there twice. One that was sealed amid a listing may be missing
    from it, or be there as it was when it was open: then what follows it was written after the backup began.

    Args:
        paths: Paths of the copied files, relative to the workspace.
    """
    suffixes: dict[int, set[str]] = {}
    segments = {path: PurePosixPath(path) for path in paths if path.startswith(_SEGMENTS)}
    segments = {path: file for path, file in segments.items() if file.suffix in (".open", ".jsonl")}
    for file in segments.values():
        suffixes.setdefault(int(file.stem), set()).add(file.suffix)
    last = next(number for number in itertools.count(1) if ".jsonl" not in suffixes.get(number, ()))
    return {
        path
        for path, file in segments.items()
        if int(file.stem) > last or (file.suffix == ".open" and ".jsonl" in suffixes[int(file.stem)])
    }


def _copy_large_file(workspace: Workspace, repository: BackupRepository, path: Path, copies: _Copies) -> str:
    """Stores a file as an artifact, unless the repository has it; returns the artifact's id."""
    entry = FileEntry(file_digest(path), path.stat().st_size)
    known = parse_manifest(Artifact("", _FILE_KIND, {}, {FILE_NAME: entry}).manifest)
    if not repository.verify_sizes(known.id):
        return known.id
    with _staging_folder(workspace) as folder:
        # The copy is what is sealed: the file itself may change meanwhile.
        shutil.copyfile(path, folder / FILE_NAME)
        artifact = workspace.artifacts.seal(folder, _FILE_KIND, {})
        repository.add_copy(folder, artifact)
    copies.add(artifact.size)
    return artifact.id


@contextmanager
def _staging_folder(workspace: Workspace) -> Iterator[Path]:
    """Yields a temporary folder, outside the workspace if that is on a read-only disk."""
    temporary = workspace.home / "tmp"
    if os.access(temporary, os.W_OK):
        with temporary_folder(temporary) as folder:
            yield folder
    else:
        with tempfile.TemporaryDirectory(prefix="posttrain-") as name:
            yield Path(name)


@dataclass(frozen=True)
class Backup:
    """A backup in a repository.

    Attributes:
        id: Of its artifact.
        created_at: Time in UTC.
        workspace: Name of the workspace's folder.
        artifacts: Ids of the workspace's artifacts in the repository.
        missing: Ids of artifacts that were damaged in the workspace, and that the backup lacks.
        files: The name in the backup's artifact, or an artifact's id, of each file by its path in the workspace.
        rows: Number of rows of the database.
    """

    id: str
    created_at: datetime
    workspace: str
    artifacts: list[str]
    missing: list[str]
    files: Mapping[str, str]
    rows: int

    @property
    def line(self) -> str:
        """The backup in one line."""
        return (
            f"{self.id}  {self.created_at:%Y-%m-%d %H:%M:%S} UTC  {self.workspace}  {len(self.artifacts):,} artifacts"
        )


def list_backups(repository: BackupRepository) -> list[Backup]:
    """Returns the repository's backups, oldest first; a damaged one is left out with a warning."""
    backups = []
    for id in repository.ids():
        if not id.startswith(f"{KIND}-"):
            continue
        try:
            backups.append(_read_backup(repository.get(id)))
        except (DamagedArtifactError, ValueError) as error:
            log.warning("%s; leaving this backup out", error)
    return sorted(backups, key=lambda backup: backup.created_at)


def _read_backup(artifact: Artifact) -> Backup:
    id, meta = artifact.id, artifact.meta
    try:
        for name, source in meta["files"].items():
            # The names become paths; what is restored to `.posttrain` must not replace its database or locks.
            parts = Path(name).parts
            own = parts[:1] == (".posttrain",) and not name.startswith(tuple(f".posttrain/{at}/" for at in _FOLDERS))
            outside = Path(name).is_absolute() or ".." in parts
            if own or outside or not (source in artifact.files or is_artifact_id(source)):
                raise ValueError(f"{id}: the file {name!r} does not belong to a backup")
        return Backup(
            id=id,
            created_at=datetime.fromisoformat(meta["created_at"]),
            workspace=meta["workspace"],
            artifacts=meta["artifacts"],
            missing=meta["missing"],
            files=meta["files"],
            rows=meta["rows"],
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{id} is not a backup: {error}") from None
