"""Restores from backups only what is damaged or missing in a workspace."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from posttrain.store.artifacts import missing_error
from posttrain.store.backup import Backup
from posttrain.store.backup_repository import BackupRepository
from posttrain.store.errors import DamagedArtifactError
from posttrain.store.files import temporary_folder
from posttrain.store.hashing import decode_line, read_lines
from posttrain.store.progress import progress_bar
from posttrain.store.restore import backup_file, restore_artifact, write_file
from posttrain.store.workspace import Workspace

_SEGMENTS = ".posttrain/inbox/segments/"


def restore_damaged(
    repository: BackupRepository, backups: Sequence[Backup], workspace: Workspace, segments: Mapping[Path, str]
) -> tuple[list[str], list[str]]:
    """Replaces damaged and missing artifacts, and sealed files of feedback, by those of the backups.

    Rows, and everything that is whole, stay as they are.

    Args:
        repository: Where the backups are.
        backups: The backups, oldest first; also of other workspaces, of which only equal artifacts are used.
        workspace: The workspace.
        segments: What is wrong with each damaged or missing file of feedback.

    Returns:
        What was restored, and what is damaged and in no backup.
    """
    restored, missing = [], []
    held = {id for backup in backups for id in backup.artifacts}
    with workspace.lock():
        ids = [row.id for row in workspace.metadata.artifacts()]
        with progress_bar("verifying", len(ids), "artifacts") as advance:
            for id in ids:
                if workspace.artifacts.verify(id):
                    try:
                        if id not in held:
                            raise missing_error(id, "the backup")
                        restore_artifact(repository, id, workspace.artifacts)
                        restored.append(id)
                    except DamagedArtifactError as error:
                        missing.append(str(error))
                advance(1)
        for path, problem in segments.items():
            name = path.relative_to(workspace.root).as_posix()
            if _restore_segment(repository, backups, workspace, name):
                restored.append(name)
            else:
                missing.append(f"{name}: {problem}")
    return restored, missing


def _restore_segment(repository: BackupRepository, backups: Sequence[Backup], workspace: Workspace, name: str) -> bool:
    """Restores a sealed segment from the newest backup of this inbox that holds it; returns whether there is one."""
    # A sealed segment never changes, so that any backup's is the same; an open one may have grown since.
    if not name.endswith(".jsonl"):
        return False
    for backup in reversed(backups):
        if name not in backup.files:
            continue
        with temporary_folder(workspace.home / "tmp") as folder:
            try:
                repository.copy_to(backup.id, folder)
                with backup_file(repository, folder, backup.files[name]) as copy:
                    if _is_whole(copy) and _is_same_inbox(repository, backup, folder, workspace, name):
                        write_file(copy, workspace.root / name)
                        return True
            except DamagedArtifactError:
                continue  # another backup may be whole
    return False


def _is_same_inbox(repository: BackupRepository, backup: Backup, folder: Path, workspace: Workspace, name: str) -> bool:
    """Returns whether a segment of the backup is one of this workspace's, by its entries and its neighbours'.

    Args:
        repository: Where the backup is.
        backup: The backup; its repository may hold others' too, and the segments of all inboxes have the same names.
        folder: The files of the backup's artifact.
        workspace: The workspace.
        name: Name of the segment.
    """
    number, equal = int(Path(name).stem), False
    for stem in (f"{near:06d}" for near in range(max(number - 1, 1), number + 2)):
        entries: set[bytes] = set()
        backup_entries: set[bytes] = set()
        for path in (f"{_SEGMENTS}{stem}.jsonl", f"{_SEGMENTS}{stem}.open"):
            if (workspace.root / path).exists():
                entries |= _intact_lines(workspace.root / path)
            if path in backup.files:
                with backup_file(repository, folder, backup.files[path]) as copy:
                    backup_entries |= _intact_lines(copy)
        if entries and backup_entries:
            # Not equal: one may be damaged, or have grown after the backup.
            if not (entries <= backup_entries or backup_entries <= entries):
                return False
            equal = True
    return equal or backup.workspace == workspace.root.name


def _is_whole(segment: Path) -> bool:
    raw = segment.read_bytes()
    lines = read_lines(raw)
    return not lines.damaged and 0 < lines.whole == len(raw)


def _intact_lines(segment: Path) -> set[bytes]:
    return {line for line in segment.read_bytes().split(b"\n") if decode_line(line) is not None}
