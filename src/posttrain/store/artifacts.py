"""Artifacts: immutable folders whose content is their id, with a checksum for every file."""

import hashlib
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from posttrain.store.errors import DamagedArtifact, UserError
from posttrain.store.files import folder_files, make_readable, sync_file, sync_folder, writing
from posttrain.store.hashing import canonical_json, file_digest
from posttrain.store.staging import claimed_folder, remove_unclaimed

MANIFEST = "manifest.json"
_KIND = re.compile(r"[a-z][a-z0-9_]*")
_ID = re.compile(r"[a-z][a-z0-9_]*-[0-9a-f]{16}")


@dataclass(frozen=True)
class FileEntry:
    """A file's SHA-256 in hex and its size in bytes."""

    sha256: str
    size: int


@dataclass(frozen=True)
class Artifact:
    """What an artifact's manifest says. ``files`` maps POSIX paths below its folder to their checksums."""

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

    def stage(self) -> AbstractContextManager[Path]:
        """A fresh temporary folder to fill and to commit; removed afterwards if it was not committed.

        Raises:
            UserError: the disk refused.
        """
        return claimed_folder(self._temporary)

    def commit(self, folder: Path, kind: str, meta: Mapping[str, Any]) -> Artifact:
        """Make a folder from `stage` an artifact; the folder is gone afterwards.

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
        with writing(folder):
            files = folder_files(folder)
            if MANIFEST in files:
                raise ValueError(f"{files[MANIFEST]}: this name is the store's own")
            entries = {}
            for name, path in files.items():
                make_readable(path)
                sync_file(path)
                entries[name] = FileEntry(file_digest(path), path.stat().st_size)
            artifact = read_manifest(Artifact("", kind, dict(meta), entries).manifest)
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
        """Whether the artifact was committed; says nothing about damage."""

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
        return remove_unclaimed(self._temporary)


def read_manifest(content: bytes) -> Artifact:
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


def checked_manifest(id: str, content: bytes) -> Artifact:
    """Read the manifest of the artifact ``id``.

    Raises:
        DamagedArtifact: the manifest is not the one that made the id.
    """
    try:
        artifact = read_manifest(content)
    except ValueError:
        raise DamagedArtifact(f"artifact {id} is damaged: {MANIFEST} cannot be read") from None
    if artifact.id != id:
        raise DamagedArtifact(f"artifact {id} is damaged: {MANIFEST} differs from its checksum")
    return artifact


def find_problems(folder: Path, artifact: Artifact) -> list[str]:
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


def damaged(id: str, problems: list[str]) -> DamagedArtifact:
    """The error that names the damaged files."""
    return DamagedArtifact(f"artifact {id} is damaged: {'; '.join(problems)}")


def missing(id: str, place: str) -> DamagedArtifact:
    """The error for an artifact that is not in the store."""
    return DamagedArtifact(f"artifact {id} is missing from {place}")


def is_id(text: str) -> bool:
    """Whether ``text`` has the form of an artifact id; keeps paths out of the store's folders."""
    return _ID.fullmatch(text) is not None


def open_artifacts(url: str | None, home: Path) -> ArtifactStore:
    """The artifact store at ``url`` (None: ``home/artifacts``).

    Args:
        home: the workspace's ``.posttrain``, which holds temporary files and copies of remote artifacts.

    Raises:
        UserError: the URL is wrong, or what it needs is not installed.
    """
    from posttrain.store.local_artifacts import LocalArtifacts

    if url is None:
        return LocalArtifacts(home / "artifacts", home / "tmp")
    protocol, separator, path = url.partition("://")
    if not separator or not path:
        raise UserError(f"`{url}` is no artifact URL", where="store.artifacts", fix="such as s3://bucket/prefix")
    if protocol in ("file", "local"):
        root = home.parent / path  # an absolute path stands for itself
        return LocalArtifacts(root, root / ".tmp")
    from posttrain.store.remote_artifacts import RemoteArtifacts

    return RemoteArtifacts(url, home)


def each_id(names: Iterator[str]) -> list[str]:
    """Those of ``names`` that are artifact ids, sorted."""
    return sorted(name for name in names if is_id(name))
