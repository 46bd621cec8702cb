"""Artifacts in a local folder: one rename makes an artifact visible."""

import errno
import os
from contextlib import AbstractContextManager
from pathlib import Path

from posttrain.store.artifacts import (
    MANIFEST,
    Artifact,
    ArtifactStore,
    checked_manifest,
    damaged,
    each_id,
    find_problems,
    is_id,
    missing,
)
from posttrain.store.errors import DamagedArtifact, WorkError
from posttrain.store.files import sync_folder, writing
from posttrain.store.staging import claimed_folder, remove_unclaimed

_ATTEMPTS = 20


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

    def stage(self) -> AbstractContextManager[Path]:
        with writing(self.root):
            for folder in (self.root, self._temporary):
                folder.mkdir(parents=True, exist_ok=True)
            one_disk = self.root.stat().st_dev == self._temporary.stat().st_dev
        return claimed_folder(self._temporary if one_disk else self._beside)

    def remove_abandoned(self) -> int:
        return super().remove_abandoned() + remove_unclaimed(self._beside)

    def publish(self, folder: Path, artifact: Artifact) -> None:
        target = self.root / artifact.id
        with writing(self.root):
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
        return is_id(id) and (self.root / id / MANIFEST).is_file()

    def get(self, id: str) -> Artifact:
        if not is_id(id):
            raise missing(id, str(self.root))
        try:
            content = (self.root / id / MANIFEST).read_bytes()
        except FileNotFoundError:
            raise missing(id, str(self.root)) from None
        return checked_manifest(id, content)

    def path(self, id: str) -> Path:
        folder = self.root / id
        artifact = self.get(id)
        if id not in self._verified:
            if problems := find_problems(folder, artifact):
                raise damaged(id, problems)
            self._verified.add(id)
        return folder

    def ids(self) -> list[str]:
        if not self.root.is_dir():
            return []
        return [id for id in each_id(path.name for path in self.root.iterdir()) if self.exists(id)]

    def delete(self, id: str) -> None:
        if is_id(id):
            self._discard(self.root / id)
            self._verified.discard(id)

    def verify(self, id: str) -> list[str]:
        try:
            return find_problems(self.root / id, self.get(id))
        except (DamagedArtifact, FileNotFoundError) as error:
            return [str(error)]

    def _discard(self, target: Path) -> None:
        """Take a folder out of sight by one rename, then remove it."""
        with self.stage() as trash:
            try:
                os.rename(target, trash / target.name)
            except FileNotFoundError:
                return
            sync_folder(self.root)
