"""Repositories of backups: a tar file, a folder or a URL, each with artifacts in it."""

import os
import shutil
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Protocol

from posttrain.store.artifacts import (
    MANIFEST,
    Artifact,
    LocalArtifacts,
    artifact_ids,
    damaged_error,
    find_damage,
    missing_error,
    verify_manifest,
)
from posttrain.store.errors import DamagedArtifactError, UserError
from posttrain.store.files import (
    check_new_file,
    disk_errors,
    make_folder,
    remove_abandoned_folders,
    sync_folder,
    temporary_folder,
)

_STAGING = ".tmp"

_FIX_NAME = "name a file, folder or URL with backups"


class BackupRepository(Protocol):
    """The part of a store of artifacts that backups use; `posttrain.store.artifacts.ArtifactStore` implements it."""

    def ids(self) -> list[str]:
        """Returns the ids of all artifacts, sorted."""

    def get(self, id: str) -> Artifact:
        """Reads an artifact's manifest."""

    def verify_sizes(self, id: str) -> list[str]:
        """Returns a line for each file that is missing or has the wrong size; for a missing artifact one too."""

    def add_copy(self, folder: Path, artifact: Artifact) -> None:
        """Stores a copy of a sealed folder."""

    def copy_to(self, id: str, folder: Path) -> None:
        """Copies an artifact's files into an existing folder, and compares them with their checksums."""


class TarRepository:
    """Artifacts in one tar file, which is written once and then only read; ``ID/NAME`` for each file.

    Args:
        tar: The open file.
        location: Its path, for errors.
    """

    def __init__(self, tar: tarfile.TarFile, location: str) -> None:
        self._tar, self._location = tar, location
        self._members = {member.name: member for member in tar.getmembers()} if tar.mode == "r" else {}

    def ids(self) -> list[str]:
        return artifact_ids(name.partition("/")[0] for name in self._members if name.endswith(f"/{MANIFEST}"))

    def get(self, id: str) -> Artifact:
        member = self._members.get(f"{id}/{MANIFEST}")
        content = self._tar.extractfile(member) if member is not None and member.isfile() else None
        if content is None:
            raise missing_error(id, self._location)
        return verify_manifest(id, content.read())

    def verify_sizes(self, id: str) -> list[str]:
        try:
            artifact = self.get(id)
        except DamagedArtifactError as error:
            return [str(error)]
        sizes = {name: member.size for name in artifact.files if (member := self._members.get(f"{id}/{name}"))}
        return [f"{name} is incomplete" for name, entry in artifact.files.items() if sizes.get(name) != entry.size]

    def add_copy(self, folder: Path, artifact: Artifact) -> None:
        for name in (*artifact.files, MANIFEST):
            self._tar.add(folder / name, f"{artifact.id}/{name}", recursive=False)

    def copy_to(self, id: str, folder: Path) -> None:
        artifact = self.get(id)
        for name in artifact.files:
            member = self._members.get(f"{id}/{name}")
            content = self._tar.extractfile(member) if member is not None and member.isfile() else None
            if content is None:
                continue  # `find_damage` names it, together with all others
            with disk_errors(folder):
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                with content, (folder / name).open("wb") as file:
                    shutil.copyfileobj(content, file, 8 << 20)
        if problems := find_damage(folder, artifact):
            raise damaged_error(id, problems)
        with disk_errors(folder):
            (folder / MANIFEST).write_bytes(artifact.manifest)


@contextmanager
def create_repository(location: str, home: Path) -> Iterator[BackupRepository]:
    """Opens a repository to write a backup to.

    Args:
        location: A URL; a folder that exists, or a path with ``/`` at its end; else the path of a new tar file, which
            has its name only once it is whole.
        home: The workspace's ``.posttrain``.

    Raises:
        UserError: the file exists, the folder holds something else, or the repository cannot be written to.
    """
    path = Path(location)
    if "://" in location:
        yield _open_url(location, home)
    elif location.endswith(("/", os.sep)) or path.is_dir():
        make_folder(path)
        # For its owner alone, like the workspace's folder, if nobody has put anything there yet; what a killed backup
        # leaves does not count.
        if not any(child.name != _STAGING for child in path.iterdir()):
            # A share's folder belongs to another user, who has chosen its mode.
            with disk_errors(path), suppress(PermissionError):
                path.chmod(0o700)
        elif not _local(path).ids():
            raise UserError("the folder holds something else", where=location, fix="name an empty or a new folder")
        artifacts = _local(path)
        with disk_errors(path):
            artifacts.remove_abandoned()
        yield artifacts
    else:
        check_new_file(path)
        with _new_tar(path) as repository:
            yield repository


@contextmanager
def _new_tar(path: Path) -> Iterator[TarRepository]:
    parent = path.absolute().parent
    staging = parent / f".{path.name[:50]}{_STAGING}"  # shortened, as a name has at most 255 bytes
    try:
        with disk_errors(path):
            remove_abandoned_folders(staging)  # of a killed backup, as large as the workspace
        with temporary_folder(staging) as folder, disk_errors(path):
            # Only its owner may read it: records may be personal, and a config may hold passwords.
            descriptor = os.open(folder / "tar", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "wb") as file:
                with tarfile.open(fileobj=file, mode="w", format=tarfile.PAX_FORMAT) as tar:
                    yield TarRepository(tar, str(path))
                file.flush()
                os.fsync(file.fileno())
            check_new_file(path)  # again, as another backup may have taken the name meanwhile
            os.replace(folder / "tar", path)
            sync_folder(parent)
    finally:
        with suppress(OSError):
            staging.rmdir()  # unless another backup of this name is being written


@contextmanager
def open_repository(location: str, home: Path) -> Iterator[BackupRepository]:
    """Opens a repository to read backups from.

    Args:
        location: A URL, a folder, or a tar file.
        home: A folder for temporary files.

    Raises:
        UserError: nothing has the name, or it is not a tar file.
    """
    path = Path(location)
    if "://" in location:
        yield _open_url(location, home)
    elif path.is_dir():
        yield _local(path)
    elif path.is_file():
        try:
            # Invalid blocks are skipped: one flipped bit in a header must not cost all artifacts behind it.
            with tarfile.open(path, "r:", ignore_zeros=True) as tar:
                yield TarRepository(tar, location)
        except (tarfile.TarError, EOFError) as error:
            raise UserError(f"no backup ({error})", where=location, fix=_FIX_NAME) from None
    else:
        raise UserError("there is no such file or folder", where=location, fix=_FIX_NAME)


def _open_url(url: str, home: Path) -> BackupRepository:
    if not url.partition("://")[2].strip("/"):
        raise UserError("names no repository", where=url, fix="such as s3://bucket/backups")
    # Here, as the module is slow to import with fsspec.
    from posttrain.store.remote_artifacts import RemoteArtifacts

    return RemoteArtifacts.open(url, home)


def _local(folder: Path) -> LocalArtifacts:
    return LocalArtifacts(folder, folder / _STAGING)
