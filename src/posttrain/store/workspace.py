"""The workspace: a folder with its artifacts, its metadata database, scratch folders and locks."""

import json
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from types import TracebackType

from posttrain import __version__
from posttrain.store.artifacts import ArtifactStore, LocalArtifacts
from posttrain.store.config import StoreConfig, expand_variables
from posttrain.store.database import RECOVER
from posttrain.store.errors import (
    EmptyDatabaseError,
    LostDatabaseError,
    MovedWorkspaceError,
    UserError,
    is_user_mistake,
)
from posttrain.store.extensions import Registry
from posttrain.store.files import (
    HOME,
    disk_errors,
    folder_id,
    hold_lock,
    remove_tree,
    sync_folder,
    sync_name,
    temporary_folder,
    write_atomically,
)
from posttrain.store.journal import Journal, JournalEnd
from posttrain.store.metadata import Metadata
from posttrain.store.rows import Run
from posttrain.store.workers import WORK, exclude_workers, is_working, join_workers

FORMAT = 1  # of the folder's layout; the database counts its own versions

JOURNAL = "journal.jsonl"


STORES: Registry[type[ArtifactStore]] = Registry(
    "artifact store", "posttrain.stores", {"file": LocalArtifacts, "local": LocalArtifacts}, ArtifactStore
)
"""Artifact stores by the name in front of ``://``; any other name is a protocol of fsspec, such as ``s3``."""


def open_artifacts(url: str | None, home: Path) -> ArtifactStore:
    """Opens the artifact store at ``url``, the config key ``store.artifacts``.

    Args:
        url: A URL; or the name or dotted path of a store, alone or as ``NAME://LOCATION``; None: ``home/artifacts``.
        home: The workspace's ``.posttrain``, which holds temporary files and copies of remote artifacts.

    Raises:
        UserError: the URL is wrong, the store cannot be imported, or something that it needs is not installed.
    """
    if url is None:
        return LocalArtifacts.open("", home)
    name, separator, location = url.partition("://")
    if name in STORES and (location or name not in STORES.builtin):
        return STORES.load(name, "store.artifacts").open(location, home)
    if not separator or not location:
        raise UserError(f"`{url}` is not an artifact URL", where="store.artifacts", fix="such as s3://bucket/prefix")
    # Here, as fsspec is slow to import.
    from posttrain.store.remote_artifacts import RemoteArtifacts

    return RemoteArtifacts.open(url, home)


class Workspace(AbstractContextManager["Workspace"]):
    """An open workspace; `create` or `open` opens it, `close` or the end of a ``with`` block closes it.

    Attributes:
        root: The workspace's folder, without links: it stays the same when a link to it changes.
        home: ``root/.posttrain``.
        worker: Id of this process while it works here; see `work`.
        scratch: Folder of the folders, named by the keys of stages, with what a stage resumes from; they survive kills.
    """

    def __init__(self, root: Path, metadata: Metadata, artifacts: ArtifactStore) -> None:
        self.root = root
        self.home = root / HOME
        self.scratch = self.home / "scratch"
        self.metadata = metadata
        self.artifacts = artifacts
        self.worker: str | None = None
        self._created: list[Path] = []
        self._folder_id = folder_id(self.home)

    @staticmethod
    def create(root: Path, config: StoreConfig = StoreConfig()) -> "Workspace":  # noqa: B008
        """Makes ``root`` a workspace, or opens it if it is one.

        A new workspace is removed again, with its folder, if the ``with`` block ends in a user's mistake before
        anything was stored.

        Raises:
            UserError: the disk, the database or the artifact store refused.
        """
        root = root.resolve()
        home = root / HOME
        if (home / "format.json").exists():
            _check_format(home)
            _check_writable(home)
        created = [folder for folder in (home, *home.parents) if not folder.exists()]
        with disk_errors(home):
            root.mkdir(parents=True, exist_ok=True)
            for folder in (home, home / "scratch", home / "tmp", *([] if config.artifacts else [home / "artifacts"])):
                # For its owner alone: records and feedback may be personal. Who shares a workspace changes the mode.
                folder.mkdir(mode=0o700, exist_ok=True)
            if not (home / "format.json").exists():
                # All new names, those too that a killed process has made. Those in the home follow with the format.
                for folder in (home, root, *created[1:]):
                    sync_name(folder)
        try:
            artifacts = open_artifacts_of(home, config)
            metadata = _open_metadata(home, config, artifacts, create=True)
        except UserError as error:
            if created and is_user_mistake(error):
                _remove_created(created)
            raise
        if not (home / "format.json").exists():
            # Written last: until it is there, `open` finds no workspace, and a kill leaves nothing half-made.
            write_atomically(home / "format.json", json.dumps({"format": FORMAT, "made_by": __version__}).encode())
        workspace = Workspace(root, metadata, artifacts)
        workspace._created = created
        return workspace

    @staticmethod
    def open(root: Path, config: StoreConfig = StoreConfig(), *, write: bool = True) -> "Workspace":  # noqa: B008
        """Opens a workspace.

        Args:
            write: False for commands that only read; they work on a read-only disk too.

        Raises:
            UserError: there is no workspace here, a newer version wrote it, it cannot be written to (with
                ``write``), or the database or the artifact store refuses.
        """
        root = root.resolve()
        home = root / HOME
        if not (home / "format.json").exists():
            raise UserError("no workspace here", where=str(root), fix=f"posttrain init {root}")
        _check_format(home)
        if write:
            _check_writable(home)
        artifacts = open_artifacts_of(home, config)
        return Workspace(root, _open_metadata(home, config, artifacts, write=write), artifacts)

    def close(self) -> None:
        """Closes the database's connections."""
        self.metadata.close()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, Exception) and self.is_moved():
            self.close()
            if not (self.home / "format.json").exists():
                # What libraries have made in its place; a folder with anything in it is not removed.
                for folder in (self.scratch, self.home / "tmp", self.home, self.root):
                    with suppress(OSError):
                        folder.rmdir()
            # In place of what the missing folder led to, such as a file that is not found.
            raise MovedWorkspaceError(self.root) from error
        unused = self._created and is_user_mistake(error) and not self.metadata.artifacts()
        self.close()
        if unused:
            _remove_created(self._created)

    def check_location(self) -> None:
        """Raises a MovedWorkspaceError if the workspace is not at its location any more."""
        if self.is_moved():
            raise MovedWorkspaceError(self.root)

    def is_moved(self) -> bool:
        """Returns whether the store's folder is not at its location any more, or another folder is."""
        return folder_id(self.home) != self._folder_id

    @contextmanager
    def work(self) -> Iterator[None]:
        """Lets this process work in the workspace beside others, and tidies up after processes that were killed.

        Raises:
            LockedError: `lock` is held, such as for a collection of garbage or a restore.
        """
        if self.worker:
            yield
            return
        # The file's lock for this host's processes, the server's for workspaces on other hosts with its database.
        with (
            join_workers(self.home) as worker,
            self.metadata.advisory_lock(WORK, shared=True),
            self.metadata.advisory_lock(worker),
        ):
            self._tidy()
            self.worker = worker
            try:
                yield
            finally:
                self.worker = None

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Keeps all other processes from working in the workspace, and tidies up after killed ones.

        Raises:
            LockedError: another process works in it; names its id, its host and since when.
        """
        with exclude_workers(self.home), self.metadata.advisory_lock(WORK):
            self._tidy()
            yield

    @contextmanager
    def hold(self, name: str, busy_message: str) -> Iterator[None]:
        """Lets one process at a time work on a part of the workspace, such as a dataset's name.

        Raises:
            LockedError: another process does; the message begins with ``busy_message``.
        """
        with hold_lock(self.lock_path(name), busy_message=busy_message), self.metadata.advisory_lock(name):
            yield

    def lock_path(self, name: str) -> Path:
        """Returns the lock file of `hold`."""
        return self.home / f"{name}.lock"

    @property
    def loop_lock(self) -> str:
        """Name of the lock that the process holds which runs this arm's loop."""
        return "-".join(filter(None, ("loop", self.metadata.arm)))

    def is_interrupted(self, run: Run) -> bool:
        """Returns whether the process of an unfinished run has died."""
        worker = run.worker
        return worker is None or not (is_working(self.home, worker) or self.metadata.is_lock_held(worker))

    def _tidy(self) -> None:
        self.metadata.fail_runs([run.id for run in self.metadata.running() if self.is_interrupted(run)], "interrupted")
        with disk_errors(self.home):
            self.artifacts.remove_abandoned()
            self._remove_finished_scratch()

    def _remove_finished_scratch(self) -> None:
        """Removes scratch folders of finished runs, and of all runs of finished rounds."""
        # A kill before `run_stage` removes one leaves a finished run's; a failed run's is of no use after its round.
        finished = self.metadata.finished_keys() - {run.key for run in self.metadata.running()}
        for folder in self.scratch.glob("*"):
            if folder.name in finished:
                remove_tree(folder)

    @contextmanager
    def deploying(self) -> Iterator[None]:
        """Locks the choice of the champion, for moments only.

        Raises:
            UserError: another process has held the lock for a minute.
        """
        # Apart from the loop's lock: a rollback must not wait for hours of training.
        with hold_lock(self.home / "deploy.lock", wait=60):
            yield

    @property
    def champion_path(self) -> Path:
        """Path of the link to the champion's folder; it does not exist before the first champion."""
        return self.home / "-".join(filter(None, ("champion", self.metadata.arm)))

    def for_arm(self, arm: str) -> "Workspace":
        """Returns this workspace for a comparison arm.

        An arm has its own rounds, deployments and champion's link; artifacts and finished work are shared.
        """
        workspace = Workspace(self.root, self.metadata.for_arm(arm), self.artifacts)
        workspace.worker = self.worker
        return workspace

    def link_champion(self, model_id: str) -> Path:
        """Points `champion_path` to a model, atomically for every reader; returns the path.

        Raises:
            DamagedArtifactError: the model is missing or damaged; the link stays unchanged.
            UserError: the disk refused.
        """
        folder = self.artifacts.path(model_id)
        # Relative, so that the workspace can be moved.
        target = folder.relative_to(self.home) if folder.is_relative_to(self.home) else folder
        new = self.champion_path.with_suffix(".new")
        with disk_errors(self.champion_path):
            # `symlink_to` cannot replace a link, so the new one gets a name of its own and is renamed over the old:
            # a server that loads the champion meanwhile sees one or the other. A kill may have left the new name.
            with suppress(FileNotFoundError):
                new.unlink()
            new.symlink_to(target, target_is_directory=True)
            if self.champion_path.is_dir() and not self.champion_path.is_symlink():
                # A copy of the workspace may have followed the link (`cp -rL`); a link cannot replace a folder.
                with temporary_folder(self.home / "tmp") as trash:
                    os.rename(self.champion_path, trash / "champion")
            os.replace(new, self.champion_path)
            sync_folder(self.home)
        return self.champion_path


def _remove_created(created: list[Path]) -> None:
    """Removes a new workspace's home and new parent folders, unless another process works there.

    Args:
        created: The folders, the innermost first.
    """
    home, *parents = created
    # Errors are dropped: the user's mistake that led here is the one to report.
    with suppress(OSError, UserError), exclude_workers(home):
        remove_tree(home)
        for folder in parents:
            folder.rmdir()  # not `remove_tree`: a folder with anything else in it stays


def _check_format(home: Path) -> None:
    path = home / "format.json"
    try:
        format = json.loads(path.read_bytes())["format"]
    except (ValueError, KeyError, TypeError):
        raise UserError("damaged", where=str(path), fix=f'write {{"format": {FORMAT}}} into it') from None
    if not isinstance(format, int) or format > FORMAT:
        raise UserError(
            f"written by a newer version of posttrain (format {format}, known up to {FORMAT})",
            where=str(home.parent),
            fix="install that version",
        )


def _check_writable(home: Path) -> None:
    for path in (home, *(home / name for name in ("scratch", "tmp", "artifacts", "store.db", JOURNAL))):
        if path.exists() and not os.access(path, os.W_OK):
            raise UserError("read-only workspace", where=str(path), fix="use one that can be written to")


def _open_metadata(
    home: Path, config: StoreConfig, artifacts: ArtifactStore, *, create: bool = False, write: bool = True
) -> Metadata:
    """Opens the workspace's database; with ``create`` an empty one is filled with tables if the workspace is new.

    Raises:
        LostDatabaseError: there is no database or an empty one, and the workspace holds the work of an earlier one.
    """
    url, journal = database_url(home, config), Journal(home / JOURNAL)
    try:
        return Metadata(url, write=write, journal=journal)
    except EmptyDatabaseError as error:
        if not (content := describe_work(journal, artifacts)):
            if not create:
                # Nothing is lost: it is the new database of a workspace that has not worked yet.
                what = f"{error.what}, and nothing is stored here yet"
                raise EmptyDatabaseError(what, where=error.where, fix="posttrain run") from None
            return Metadata(url, create=True, write=write, journal=journal)
        empty = error
    try:
        # Another process may have filled it with tables, and begun to work, since the first look.
        return Metadata(url, write=write, journal=journal)
    except EmptyDatabaseError:
        # A new database would start over at round 0 and put an older model in service.
        what = f"{empty.what}, but the workspace holds {content}"
        fix = f"check store.database, {RECOVER} -w {home.parent}"
        if config.artifacts is not None and not (home / "format.json").exists():
            fix += "; a new workspace needs a place of its own in store.artifacts"
        raise LostDatabaseError(what, where=empty.where, fix=fix) from None


def describe_work(journal: Journal, artifacts: ArtifactStore) -> str | None:
    """Describes the work that a database knows of; None in a new workspace."""
    if count := len(artifacts.ids()):
        return "1 artifact" if count == 1 else f"{count:,} artifacts"
    end = journal.last()
    return None if end == JournalEnd() else f"a journal of its changes ({journal.path.name})"


def database_url(home: Path, config: StoreConfig) -> str:
    """Returns the URL of the workspace's database."""
    if config.database is None:
        return f"sqlite:///{home / 'store.db'}"
    return expand_variables(config.database, "store.database")


def open_artifacts_of(home: Path, config: StoreConfig) -> ArtifactStore:
    """Opens the artifact store that the config names."""
    return open_artifacts(config.artifacts and expand_variables(config.artifacts, "store.artifacts"), home)
