"""Artifacts behind an fsspec URL: the manifest is uploaded last and is the commit mark."""

import hashlib
import logging
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Self

from posttrain.store.artifacts import (
    MANIFEST,
    Artifact,
    ArtifactStore,
    LocalArtifacts,
    artifact_ids,
    damaged_error,
    find_damage,
    is_artifact_id,
    missing_error,
    verify_manifest,
)
from posttrain.store.errors import DamagedArtifactError
from posttrain.store.files import disk_errors
from posttrain.store.remote_files import open_file_system, remote_errors

log = logging.getLogger("posttrain")


class RemoteArtifacts(ArtifactStore):
    """Stores artifacts below an fsspec URL, with local copies of those that this workspace has written or read.

    Credentials, region and endpoint come from the environment, for S3 as every AWS tool reads them
    (``AWS_ACCESS_KEY_ID``, ``AWS_PROFILE``, ``AWS_ENDPOINT_URL`` ...).
    """

    def __init__(self, url: str, home: Path) -> None:
        super().__init__(home / "tmp")
        self.url = url.rstrip("/")
        self._files = open_file_system(url.partition("://")[0], "store.artifacts")
        self._root = str(self._files._strip_protocol(self.url))
        self._copies = LocalArtifacts(home / "cache", home / "tmp")
        self._damaged: set[str] = set()

    @classmethod
    def open(cls, location: str, home: Path) -> Self:
        return cls(location, home)

    def publish(self, folder: Path, artifact: Artifact) -> None:
        self.add_copy(folder, artifact)
        self._copies.publish(folder, artifact)

    def add_copy(self, folder: Path, artifact: Artifact) -> None:
        # Sizes are one listing; checksums would mean a download of what is about to be uploaded.
        if artifact.id in self._damaged or self._size_problems(artifact):
            with self._translated_errors():
                # An object store has no rename: the manifest goes last, and until it is there `exists` says no, so
                # that a kill leaves files that nobody sees and the next upload overwrites with the same bytes.
                for name in (*artifact.files, MANIFEST):
                    self._files.put_file(str(folder / name), self._at(artifact.id, name))
            self._damaged.discard(artifact.id)

    def exists(self, id: str) -> bool:
        if not is_artifact_id(id):
            return False
        with self._translated_errors():
            return bool(self._files.exists(self._at(id, MANIFEST)))

    def get(self, id: str) -> Artifact:
        if not is_artifact_id(id):
            raise missing_error(id, self.url)
        with self._translated_errors():
            try:
                content = self._files.cat_file(self._at(id, MANIFEST))
            except FileNotFoundError:
                raise missing_error(id, self.url) from None
        return verify_manifest(id, content)

    def path(self, id: str) -> Path:
        if self._copies.exists(id):
            try:
                return self._copies.path(id)
            except DamagedArtifactError as error:
                log.warning("%s; downloading it again", error)
                self._copies.delete(id)
        with self._copies.temporary_folder() as folder:
            # Not synced to the disk: if a power cut damages a copy, its checksums show it and it is downloaded again.
            artifact = self._download(id, folder)
            self._copies.publish(folder, artifact)
        return self._copies.path(id)

    def copy_to(self, id: str, folder: Path) -> None:
        self._download(id, folder)

    def ids(self) -> list[str]:
        with self._translated_errors():
            try:
                paths = self._files.ls(self._root, detail=False)
            except FileNotFoundError:
                return []  # a prefix without objects does not exist in S3
        return [id for id in artifact_ids(name.rstrip("/").rpartition("/")[2] for name in paths) if self.exists(id)]

    def delete(self, id: str) -> None:
        self._copies.delete(id)
        if not self.exists(id):
            return
        with self._translated_errors():
            # The manifest first: without it the artifact no longer exists, even if a kill leaves the other files.
            self._files.rm_file(self._at(id, MANIFEST))
            for name in self._files.find(f"{self._root}/{id}"):
                self._files.rm_file(name)

    def verify_sizes(self, id: str) -> list[str]:
        try:
            return self._size_problems(self.get(id))
        except DamagedArtifactError as error:
            return [str(error)]

    def verify(self, id: str) -> list[str]:
        try:
            artifact = self.get(id)
        except DamagedArtifactError as error:
            return [str(error)]
        problems = self._size_problems(artifact)
        with self._translated_errors():
            for name, entry in artifact.files.items():
                if any(problem.startswith(f"{name} ") for problem in problems):
                    continue
                with self._files.open(self._at(id, name), "rb") as file:
                    checksum = hashlib.sha256()
                    while block := file.read(8 << 20):
                        checksum.update(block)
                if checksum.hexdigest() != entry.sha256:
                    problems.append(f"{name} differs from its checksum")
        if problems:
            self._damaged.add(id)
        return problems

    def _size_problems(self, artifact: Artifact) -> list[str]:
        """Lists files that are missing or have the wrong size, without reading them."""
        with self._translated_errors():
            listing = self._files.find(f"{self._root}/{artifact.id}", detail=True)
        sizes = {name.removeprefix(f"{self._root}/{artifact.id}/"): info["size"] for name, info in listing.items()}
        if sizes.get(MANIFEST) != len(artifact.manifest):
            return [f"{MANIFEST} is missing"]
        problems = []
        for name, entry in artifact.files.items():
            if name not in sizes:
                problems.append(f"{name} is missing")
            elif sizes[name] != entry.size:
                problems.append(f"{name} has {sizes[name]} bytes instead of {entry.size}")
        problems += [f"{name} does not belong to it" for name in sizes if name not in {MANIFEST, *artifact.files}]
        return problems

    def _download(self, id: str, folder: Path) -> Artifact:
        artifact = self.get(id)
        for name in artifact.files:
            target = folder / name
            with disk_errors(folder):
                target.parent.mkdir(parents=True, exist_ok=True)
            with self._translated_errors(), disk_errors(folder):
                try:
                    self._files.get_file(self._at(artifact.id, name), str(target))
                except FileNotFoundError:
                    target.unlink(missing_ok=True)  # `find_damage` names it, together with all others
        if problems := find_damage(folder, artifact):
            self._damaged.add(id)
            raise damaged_error(id, problems)
        with disk_errors(folder):
            (folder / MANIFEST).write_bytes(artifact.manifest)
        return artifact

    def _at(self, id: str, name: str) -> str:
        return f"{self._root}/{id}/{name}"

    def _translated_errors(self) -> AbstractContextManager[None]:
        return remote_errors(self.url, "the artifact store", missing="make the bucket first")
