"""``posttrain backup`` and ``posttrain restore``: a workspace as it is at one moment, and its way back."""

from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from posttrain.cli.output import JsonOption, print_json, print_line
from posttrain.cli.workspace import CURRENT_FOLDER, WorkspaceOption, open_store, store_config
from posttrain.store.artifacts import LocalArtifacts
from posttrain.store.config import StoreConfig
from posttrain.store.errors import UserError
from posttrain.store.message import counted
from posttrain.store.workspace import Workspace

if TYPE_CHECKING:
    from posttrain.store.backup import Backup
    from posttrain.store.backup_repository import BackupRepository


def backup(
    location: Annotated[
        str,
        typer.Argument(
            metavar="FILE",
            help="A new file; or a folder (if new, with / at its end) or an s3:// URL, which get only what is new.",
        ),
    ],
    workspace: WorkspaceOption = CURRENT_FOLDER,
    json: JsonOption = False,
) -> None:
    """Copy the workspace as it is at one moment, while the loop runs, to a file, a folder or S3.

    Exits with 1 if an artifact is damaged: the rest is in the backup.
    """
    from posttrain.store.backup import create_backup
    from posttrain.store.backup_repository import create_repository

    with open_store(workspace) as store:
        _check_other(location, store)
        with create_repository(location, store.home) as target:
            report = create_backup(store, target)
    if json:
        print_json(asdict(report))
    else:
        files = counted(report.files, "file")
        print_line(
            f"backed up {counted(report.artifacts, 'artifact')} ({report.size / 1e6:,.1f} MB), "
            f"{counted(report.rows, 'row')} and {files} "
            f"to {location}; {report.copied:,} were new there ({report.copied_size / 1e6:,.1f} MB)"
        )
        print_line(report.id)
        for line in report.damaged:
            print_line(f"not in the backup: {line}")
    if report.damaged:
        raise typer.Exit(1)


def _check_other(location: str, store: Workspace) -> None:
    """Refuses what would be lost, or renamed by `posttrain restore --replace`, together with the workspace."""
    if "://" in location and not location.startswith("file://"):
        # Not the config's URL, which may be a ${VARIABLE}.
        own = location.rstrip("/") == getattr(store.artifacts, "url", None)
    else:
        path = Path(location.removeprefix("file://")).resolve()
        if path.is_relative_to(store.home.resolve()):
            raise UserError("lies in the workspace's .posttrain", where=location, fix="name another place")
        own = isinstance(store.artifacts, LocalArtifacts) and path == store.artifacts.root.resolve()
    if own:
        raise UserError("is the workspace's own artifact store", where=location, fix="name another place")


def restore(
    location: Annotated[str, typer.Argument(metavar="FILE", help="A file, folder or URL with backups.")],
    workspace: WorkspaceOption = CURRENT_FOLDER,
    chosen: Annotated[
        str | None, typer.Option("--backup", metavar="ID", help="Restore this backup instead of the latest.")
    ] = None,
    list_only: Annotated[bool, typer.Option("--list", help="List the backups and restore nothing.")] = False,
    damaged: Annotated[
        bool, typer.Option("--damaged", help="Restore only what is damaged or missing; keep everything else.")
    ] = False,
    replace: Annotated[
        bool, typer.Option("--replace", help="Rename the .posttrain that is there, and restore in its place.")
    ] = False,
    attach: Annotated[
        bool,
        typer.Option("--attach", help="Take over the database and artifact store of a workspace that is gone."),
    ] = False,
    json: JsonOption = False,
) -> None:
    """Restore a workspace from a backup.

    Exits with 1 if the backup lacks something: the rest is restored.
    """
    from posttrain.store.backup_repository import open_repository

    if sum((list_only, damaged, replace)) > 1:
        raise UserError("--list, --damaged and --replace exclude each other", fix="name one of them")
    with open_repository(location, workspace / ".posttrain") as source:
        if list_only:
            _list(source, json)
        elif damaged:
            _restore_damaged(source, location, chosen, workspace, json)
        else:
            _restore(source, location, chosen, workspace, replace, attach, json)


def _list(source: "BackupRepository", json: bool) -> None:
    from posttrain.store.backup import list_backups

    backups = list_backups(source)
    if json:
        print_json([_summary(backup) for backup in backups])
        return
    for backup in backups:
        print_line(backup.line)
    if not backups:
        print_line("no backups")


def _summary(backup: "Backup") -> dict[str, object]:
    counts = {"artifacts": len(backup.artifacts), "files": len(backup.files), "missing": backup.missing}
    return {
        "id": backup.id,
        "created_at": backup.created_at,
        "workspace": backup.workspace,
        "rows": backup.rows,
    } | counts


def _restore(
    source: "BackupRepository",
    location: str,
    chosen: str | None,
    root: Path,
    replace: bool,
    attach: bool,
    json: bool,
) -> None:
    from posttrain.store.restore import choose_backup, restore_backup

    backup = choose_backup(source, chosen, location)
    with ExitStack() as reading:

        def read_config() -> StoreConfig:
            # Its lines stay in the errors of the store that it names.
            return reading.enter_context(store_config(root))

        report = restore_backup(source, backup, root, read_config, replace=replace, attach=attach)
    if json:
        print_json(asdict(report) | {"backup": _summary(backup), "replaced": report.replaced and str(report.replaced)})
    else:
        rows = sum(report.rows.values())
        print_line(
            f"restored {counted(report.artifacts, 'artifact')}, {counted(rows, 'row')} and "
            f"{counted(report.files, 'file')} of "
            f"{backup.created_at:%Y-%m-%d %H:%M:%S} UTC to {root}"
        )
        print_line("a backup has no sessions, API tokens and invitations: issue new ones")
        if report.replaced:
            print_line(f"the workspace that was there is {report.replaced}")
        if report.database:
            print_line(f"{report.database} held these rows already; let no other workspace use it")
        for name in report.kept:
            print_line(f"{name} differs from the backup's and stays as it is")
        for line in report.missing:
            print_line(f"missing: {line}")
    if report.missing:
        raise typer.Exit(1)


def _restore_damaged(source: "BackupRepository", location: str, chosen: str | None, root: Path, json: bool) -> None:
    from posttrain.data.feedback.segment import inbox_problems
    from posttrain.store.backup import list_backups
    from posttrain.store.restore import choose_backup
    from posttrain.store.restore_damaged import restore_damaged

    # Any backup will do, as an artifact of one id has one content; the repository may hold those of several workspaces.
    backups = [choose_backup(source, chosen, location)] if chosen else list_backups(source)
    with store_config(root) as config, Workspace.open(root, config) as store:
        restored, missing = restore_damaged(source, backups, store, dict(inbox_problems(store.home / "inbox")))
    if json:
        print_json({"restored": restored, "missing": missing})
    else:
        for name in restored:
            print_line(f"restored {name}")
        for line in missing:
            print_line(f"in no backup: {line}")
        if not restored and not missing:
            print_line("no artifact and no feedback is damaged")
    if missing:
        raise typer.Exit(1)
