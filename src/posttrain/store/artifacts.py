"""Artifacts: immutable folders with content-addressed ids and a checksum for every file."""

import errno
import hashlib
import json
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from posttrain.store.errors import DamagedArtifactError, WorkError
from posttrain.store.files import (
    copy_files,
    disk_errors,
    folder_files,
    make_folder,
    remove_abandoned_folders,
    set_read_only,
    sync_folder,
    sync_name,
    sync_tree,
    temporary_folder,
)
from posttrain.store.hashing import canonical_json, file_digest

MANIFEST = "manifest.json"

_KIND = re.compile(r"[a-z][a-z0-9_]*")

_ID = re.compile(r"[a-z][a-z0-9_]*-[0-9a-f]{16}")

_PUBLISH_ATTEMPTS = 20  # each one lost means that another process published the same content in that moment


@dataclass(frozen=True)
class FileEntry:
    """A file's SHA-256 in hex and its size in bytes."""

    sha256: str
    size: int


@dataclass(frozen=True)
class Artifact:
    """The content of an artifact's manifest. ``files`` maps POSIX paths below its folder to their checksums."""

    id: str
    kind: str
    meta: dict[str, Any]
    files: dict[str, FileEntry]

    @property
    def size(self) -> int:
        """Bytes of all files together."""
        return sum(entry.size for entry in self.files.values())

    @property
    def manifest(self) -> bytes:
        """The manifest as it is stored; the id is made of it."""
        files = {name: {"sha256": entry.sha256, "size": entry.size} for name, entry in self.files.items()}
        return canonical_json({"kind": self.kind, "meta": self.meta, "files": files})


class ArtifactStore(ABC):
    """Stores artifacts, locally or remotely; each implementation passes the same contract suite.

    An artifact exists as a whole or not at all. Only its content (kind, meta, files) decides its id, so that the
    same content committed twice, by any process, is one artifact.

    Args:
        temporary: The folder in which artifacts are filled.
    """

    def __init__(self, temporary: Path) -> None:
        self._temporary = temporary
        self._verified: set[str] = set()

    @classmethod
    @abstractmethod
    def open(cls, location: str, home: Path) -> Self:
        """Opens the store that ``store.artifacts`` names.

        Args:
            location: The rest of that key's value after ``NAME://``; empty if it is the name alone.
            home: The workspace's ``.posttrain``, for temporary files and local copies.

        Raises:
            UserError: there is no such location, or something that it needs is not installed.
        """

    def temporary_folder(self) -> AbstractContextManager[Path]:
        """Yields a fresh temporary folder to fill and to commit; removes it afterwards if it was not committed.

        Raises:
            UserError: the disk refused.
        """
        return temporary_folder(self._temporary)

    def commit(self, folder: Path, kind: str, meta: Mapping[str, Any]) -> Artifact:
        """Makes a folder from `temporary_folder` an artifact; the folder no longer exists afterwards.

        Args:
            kind: Kind of the artifact, such as ``dataset`` or ``model``.
            meta: JSON values that belong to the content; part of the id, so no times and no paths.

        Raises:
            UserError: the disk refused.
            WorkError: the remote store cannot be reached.
            TypeError: ``meta`` has no JSON form.
            ValueError: the folder holds links or a ``manifest.json``, or ``kind`` or ``meta`` cannot be.
        """
        artifact = self.seal(folder, kind, meta)
        self.publish(folder, artifact)
        return artifact

    def seal(self, folder: Path, kind: str, meta: Mapping[str, Any]) -> Artifact:
        """Does the first half of `commit`: computes checksums, writes the manifest, syncs all to the disk.

        Nobody can see the artifact yet. Its id is known now, so that a caller can record it before `publish`.
        """
        if not _KIND.fullmatch(kind):
            raise ValueError(f"{kind!r} is not an artifact kind: lower-case letters, digits and _")
        with disk_errors(folder):
            files = folder_files(folder)
            if MANIFEST in files:
                raise ValueError(f"{files[MANIFEST]}: this name is the store's own")
            entries = {name: FileEntry(file_digest(path), path.stat().st_size) for name, path in files.items()}
            # Through the bytes and back: tuples of `meta` become lists now, as they will when it is read.
            artifact = parse_manifest(Artifact("", kind, dict(meta), entries).manifest)
            (folder / MANIFEST).write_bytes(artifact.manifest)
            # Before the rename of `publish`: a file system may order it before the data, and a power cut would leave a
            # complete-looking artifact of empty files.
            sync_tree(folder)
        return artifact

    @abstractmethod
    def publish(self, folder: Path, artifact: Artifact) -> None:
        """Does the second half of `commit`: makes a sealed folder visible in one step.

        An artifact that is there already is kept if it is whole, and replaced if it is damaged.
        """

    def add_copy(self, folder: Path, artifact: Artifact) -> None:
        """Stores a copy of a sealed folder, such as one of another store; the folder stays.

        Raises:
            UserError: the disk refused.
            WorkError: the remote store cannot be reached.
        """
        with self.temporary_folder() as copy:
            with disk_errors(copy):
                copy_files(folder, copy)
                sync_tree(copy)
            self.publish(copy, artifact)

    def copy_to(self, id: str, folder: Path) -> None:
        """Copies an artifact's files and manifest into an existing folder.

        Raises:
            DamagedArtifactError: the artifact is missing or damaged.
            UserError: the disk refused.
        """
        with disk_errors(folder):
            copy_files(self.path(id), folder)

    @abstractmethod
    def exists(self, id: str) -> bool:
        """Returns whether the artifact was committed; it may be damaged all the same."""

    @abstractmethod
    def get(self, id: str) -> Artifact:
        """Reads the artifact's manifest.

        Raises:
            DamagedArtifactError: it is missing, or its manifest is damaged.
        """

    @abstractmethod
    def path(self, id: str) -> Path:
        """Returns a local folder with the artifact's files, for reading; verifies checksums once per process.

        Raises:
            DamagedArtifactError: it is missing or damaged; names the files.
        """

    @abstractmethod
    def ids(self) -> list[str]:
        """Returns the ids of all committed artifacts, sorted."""

    @abstractmethod
    def delete(self, id: str) -> None:
        """Removes an artifact; does nothing if there is none."""

    @abstractmethod
    def verify(self, id: str) -> list[str]:
        """Reads every byte again and returns a line for each file that is missing, damaged or foreign."""

    def verify_sizes(self, id: str) -> list[str]:
        """Does the quick half of `verify`, without reading the files where the store can compare their sizes."""
        return self.verify(id)

    def remove_abandoned(self) -> int:
        """Removes the temporary folders of killed processes; returns how many."""
        return remove_abandoned_folders(self._temporary)


def parse_manifest(content: bytes) -> Artifact:
    """Reads a manifest; the id is computed from its content.

    Raises:
        ValueError: the content is not a manifest.
    """
    try:
        values = json.loads(content)
        files = {name: FileEntry(entry["sha256"], entry["size"]) for name, entry in values["files"].items()}
        kind, meta = values["kind"], values["meta"]
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"not a manifest: {error}") from error
    # The names become paths: a foreign manifest must not lead a download or a restored backup out of its folder.
    if outside := [name for name in files if name.startswith("/") or ".." in name.split("/")]:
        raise ValueError(f"not a manifest: {outside[0]!r} lies outside the artifact")
    return Artifact(f"{kind}-{hashlib.sha256(content).hexdigest()[:16]}", kind, meta, files)


def verify_manifest(id: str, content: bytes) -> Artifact:
    """Reads the manifest of the artifact ``id``.

    Raises:
        DamagedArtifactError: the manifest is not the one that the id was computed from.
    """
    try:
        artifact = parse_manifest(content)
    except ValueError:
        raise DamagedArtifactError(f"artifact {id} is damaged: {MANIFEST} cannot be read") from None
    if artifact.id != id:
        raise DamagedArtifactError(f"artifact {id} is damaged: {MANIFEST} differs from its checksum")
    return artifact


def find_damage(folder: Path, artifact: Artifact, *, checksums: bool = True) -> list[str]:
    """Compares a folder with the artifact's manifest; returns a line for each difference.

    Args:
        checksums: False compares names and sizes only.
    """
    problems = []
    for name, entry in artifact.files.items():
        path = folder / name
        if not path.is_file():
            problems.append(f"{name} is missing")
        elif (size := path.stat().st_size) != entry.size:  # before the checksum: it costs no read
            problems.append(f"{name} has {size} bytes instead of {entry.size}")
        elif checksums and file_digest(path) != entry.sha256:
            problems.append(f"{name} differs from its checksum")
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        # Hidden files are not damage: desktops and network file systems (`.DS_Store`, `.nfs*`) leave them anywhere.
        if path.is_file() and name not in artifact.files and name != MANIFEST and not path.name.startswith("."):
            problems.append(f"{name} does not belong to it")
    return problems


def damaged_error(id: str, problems: list[str]) -> DamagedArtifactError:
    """Returns the error that names the damaged files."""
    return DamagedArtifactError(f"artifact {id} is damaged: {'; '.join(problems)}")


def missing_error(id: str, location: str) -> DamagedArtifactError:
    """Returns the error for an artifact that is not in the store."""
    return DamagedArtifactError(f"artifact {id} is missing from {location}")


def is_artifact_id(text: str) -> bool:
    """Returns whether ``text`` has the form of an artifact id."""
    # Ids become paths: `../..` from a command line must not lead out of the store.
    return _ID.fullmatch(text) is not None


def artifact_ids(names: Iterator[str]) -> list[str]:
    """Returns those of ``names`` that are artifact ids, sorted."""
    return sorted(name for name in names if is_artifact_id(name))


class LocalArtifacts(ArtifactStore):
    """Stores artifacts as folders below ``root``, named by their ids.

    Args:
        temporary: Staging folder; on another file system than ``root``, ``root/.tmp`` is used instead.
    """

    def __init__(self, root: Path, temporary: Path) -> None:
        super().__init__(temporary)
        self.root = root
        self._staging_in_root = root / ".tmp"

    @classmethod
    def open(cls, location: str, home: Path) -> Self:
        if not location:
            return cls(home / "artifacts", home / "tmp")
        root = home.parent / location  # `/` with an absolute path on the right is that path
        return cls(root, root / ".tmp")

    def temporary_folder(self) -> AbstractContextManager[Path]:
        with disk_errors(self.root):
            if not self.root.is_dir():
                make_folder(self.root)
            if not self._temporary.is_dir():
                make_folder(self._temporary)
            # A rename does not cross file systems, such as a mount or a link to a larger disk.
            same_disk = self.root.stat().st_dev == self._temporary.stat().st_dev
        return temporary_folder(self._temporary if same_disk else self._staging_in_root)

    def remove_abandoned(self) -> int:
        if self.root.is_dir():
            # A killed process may leave an artifact, or the root, whose name is not on the disk; `run_stage` records
            # such an artifact, and a power cut must not take it afterwards.
            sync_name(self.root)
            sync_folder(self.root)
        return super().remove_abandoned() + remove_abandoned_folders(self._staging_in_root)

    def publish(self, folder: Path, artifact: Artifact) -> None:
        target = self.root / artifact.id
        with disk_errors(self.root):
            if not self.root.is_dir():
                make_folder(self.root)
            # Nothing changes an artifact: an editor or a script that tries to is refused.
            for name in (*artifact.files, MANIFEST):
                set_read_only(folder / name)
            for _ in range(_PUBLISH_ATTEMPTS):
                # Committing again is how a damaged artifact is mended, so an existing one is read before it is kept.
                if self.exists(artifact.id) and not self.verify(artifact.id):
                    break
                self._discard(target)
                try:
                    os.rename(folder, target)
                    break
                except OSError as error:
                    # Another process published the same id since the check: look at its folder in the next attempt.
                    if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                        raise
            else:
                raise WorkError(f"{target}: other processes keep replacing this artifact")
            # The folder's new name too, else the database could know an artifact that a power cut has undone.
            sync_folder(self.root)
        self._verified.add(artifact.id)

    def exists(self, id: str) -> bool:
        return is_artifact_id(id) and (self.root / id / MANIFEST).is_file()

    def get(self, id: str) -> Artifact:
        if not is_artifact_id(id):
            raise missing_error(id, str(self.root))
        try:
            content = (self.root / id / MANIFEST).read_bytes()
        except FileNotFoundError:
            raise missing_error(id, str(self.root)) from None
        return verify_manifest(id, content)

    def path(self, id: str) -> Path:
        folder = self.root / id
        artifact = self.get(id)
        if id not in self._verified:
            if problems := find_damage(folder, artifact):
                raise damaged_error(id, problems)
            self._verified.add(id)
        return folder

    def ids(self) -> list[str]:
        if not self.root.is_dir():
            return []
        return [id for id in artifact_ids(path.name for path in self.root.iterdir()) if self.exists(id)]

    def delete(self, id: str) -> None:
        if is_artifact_id(id):
            self._discard(self.root / id)
            self._verified.discard(id)

    def verify(self, id: str) -> list[str]:
        return self._problems(id, checksums=True)

    def verify_sizes(self, id: str) -> list[str]:
        return self._problems(id, checksums=False)

    def _problems(self, id: str, *, checksums: bool) -> list[str]:
        try:
            return find_damage(self.root / id, self.get(id), checksums=checksums)
        except (DamagedArtifactError, FileNotFoundError) as error:
            return [str(error)]

    def _discard(self, target: Path) -> None:
        """Removes a folder."""
        # First one rename out of the store: a kill amid the removal of files would leave a damaged artifact.
        with self.temporary_folder() as trash:
            try:
                os.rename(target, trash / target.name)
            except FileNotFoundError:
                return
            sync_folder(self.root)
