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
from typing import Any

from posttrain.store.errors import DamagedArtifactError, WorkError
from posttrain.store.files import (
    disk_errors,
    folder_files,
    remove_abandoned_folders,
    set_default_mode,
    sync_file,
    sync_folder,
    temporary_folder,
)
from posttrain.store.hashing import canonical_json, file_digest

MANIFEST = "manifest.json"

_KIND = re.compile(r"[a-z][a-z0-9_]*")

_ID = re.compile(r"[a-z][a-z0-9_]*-[0-9a-f]{16}")

_ATTEMPTS = 20


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
    """Artifacts in one place, local or remote; each implementation passes the same contract suite.

    An artifact is there as a whole or not at all. Only its content (kind, meta, files) decides its id, so
    that the same content committed twice, by whomever, is one artifact.
    """

    def __init__(self, temporary: Path) -> None:
        self._temporary = temporary
        self._verified: set[str] = set()

    def temporary_folder(self) -> AbstractContextManager[Path]:
        """A fresh temporary folder to fill and to commit; removed afterwards if it was not committed.

        Raises:
            UserError: the disk refused.
        """
        return temporary_folder(self._temporary)

    def commit(self, folder: Path, kind: str, meta: Mapping[str, Any]) -> Artifact:
        """Make a folder from `temporary_folder` an artifact; the folder is gone afterwards.

        Args:
            kind: what it is, such as ``dataset`` or ``model``.
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
        """The first half of `commit`: checksums, the manifest, all on the disk; nobody can see it yet."""
        if not _KIND.fullmatch(kind):
            raise ValueError(f"{kind!r} is no artifact kind: lower-case letters, digits and _")
        with disk_errors(folder):
            files = folder_files(folder)
            if MANIFEST in files:
                raise ValueError(f"{files[MANIFEST]}: this name is the store's own")
            entries = {}
            for name, path in files.items():
                set_default_mode(path)
                sync_file(path)
                entries[name] = FileEntry(file_digest(path), path.stat().st_size)
            artifact = parse_manifest(Artifact("", kind, dict(meta), entries).manifest)
            (folder / MANIFEST).write_bytes(artifact.manifest)
            sync_file(folder / MANIFEST)
            for inner in (folder, *(path for path in folder.rglob("*") if path.is_dir())):
                sync_folder(inner)
        return artifact

    @abstractmethod
    def publish(self, folder: Path, artifact: Artifact) -> None:
        """The second half of `commit`: make a sealed folder visible at once.

        An artifact that is there already is kept if it is whole, and replaced if it is damaged.
        """

    @abstractmethod
    def exists(self, id: str) -> bool:
        """Returns whether the artifact was committed; it may be damaged all the same."""

    @abstractmethod
    def get(self, id: str) -> Artifact:
        """The artifact's manifest.

        Raises:
            DamagedArtifact: it is missing, or its manifest is damaged.
        """

    @abstractmethod
    def path(self, id: str) -> Path:
        """A local folder with the artifact's files, to be read only; checksums are verified once a process.

        Raises:
            DamagedArtifact: it is missing or damaged; names the files.
        """

    @abstractmethod
    def ids(self) -> list[str]:
        """The ids of all committed artifacts, sorted."""

    @abstractmethod
    def delete(self, id: str) -> None:
        """Remove an artifact; nothing happens if it is not there."""

    @abstractmethod
    def verify(self, id: str) -> list[str]:
        """Read every byte again: a line for each file that is missing, damaged or foreign."""

    def remove_abandoned(self) -> int:
        """Remove the temporary folders of killed processes; returns how many."""
        return remove_abandoned_folders(self._temporary)


def parse_manifest(content: bytes) -> Artifact:
    """Read a manifest; its id is made of its content.

    Raises:
        ValueError: it is no manifest.
    """
    try:
        values = json.loads(content)
        files = {name: FileEntry(entry["sha256"], entry["size"]) for name, entry in values["files"].items()}
        kind, meta = values["kind"], values["meta"]
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"no manifest: {error}") from error
    return Artifact(f"{kind}-{hashlib.sha256(content).hexdigest()[:16]}", kind, meta, files)


def verify_manifest(id: str, content: bytes) -> Artifact:
    """Read the manifest of the artifact ``id``.

    Raises:
        DamagedArtifact: the manifest is not the one that made the id.
    """
    try:
        artifact = parse_manifest(content)
    except ValueError:
        raise DamagedArtifactError(f"artifact {id} is damaged: {MANIFEST} cannot be read") from None
    if artifact.id != id:
        raise DamagedArtifactError(f"artifact {id} is damaged: {MANIFEST} differs from its checksum")
    return artifact


def find_damage(folder: Path, artifact: Artifact) -> list[str]:
    """Compare a folder with the artifact's manifest, byte for byte; foreign hidden files are let be."""
    problems = []
    for name, entry in artifact.files.items():
        path = folder / name
        if not path.is_file():
            problems.append(f"{name} is missing")
        elif (size := path.stat().st_size) != entry.size:
            problems.append(f"{name} has {size} bytes instead of {entry.size}")
        elif file_digest(path) != entry.sha256:
            problems.append(f"{name} differs from its checksum")
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
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
    """Returns whether ``text`` has the form of an artifact id; anything else could name a path outside the store."""
    return _ID.fullmatch(text) is not None


def artifact_ids(names: Iterator[str]) -> list[str]:
    """Those of ``names`` that are artifact ids, sorted."""
    return sorted(name for name in names if is_artifact_id(name))


class LocalArtifacts(ArtifactStore):
    """Artifacts as folders below ``root``, named by their ids.

    Args:
        temporary: where folders are staged; if it lies on another file system than ``root`` (a mount, a link
            to a larger disk), they are staged inside ``root``, as a rename does not cross file systems.
    """

    def __init__(self, root: Path, temporary: Path) -> None:
        super().__init__(temporary)
        self.root = root
        self._beside = root / ".tmp"

    def temporary_folder(self) -> AbstractContextManager[Path]:
        with disk_errors(self.root):
            for folder in (self.root, self._temporary):
                folder.mkdir(parents=True, exist_ok=True)
            one_disk = self.root.stat().st_dev == self._temporary.stat().st_dev
        return temporary_folder(self._temporary if one_disk else self._beside)

    def remove_abandoned(self) -> int:
        return super().remove_abandoned() + remove_abandoned_folders(self._beside)

    def publish(self, folder: Path, artifact: Artifact) -> None:
        target = self.root / artifact.id
        with disk_errors(self.root):
            self.root.mkdir(parents=True, exist_ok=True)
            for _ in range(_ATTEMPTS):
                if self.exists(artifact.id) and not self.verify(artifact.id):
                    break
                self._discard(target)
                try:
                    os.rename(folder, target)
                    break
                except OSError as error:
                    if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                        raise
            else:
                raise WorkError(f"{target}: other processes keep replacing this artifact")
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
        try:
            return find_damage(self.root / id, self.get(id))
        except (DamagedArtifactError, FileNotFoundError) as error:
            return [str(error)]

    def _discard(self, target: Path) -> None:
        """Take a folder out of sight by one rename, then remove it."""
        with self.temporary_folder() as trash:
            try:
                os.rename(target, trash / target.name)
            except FileNotFoundError:
                return
            sync_folder(self.root)
