"""The folder of all checkpoints: each appears and disappears by one rename; old ones are pruned."""

import itertools
import logging
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock

from posttrain.store.files import disk_errors, make_folder, remove_abandoned_folders, sync_folder, temporary_folder
from posttrain.train.checkpoint.format import Checkpoint, DamagedCheckpoint
from posttrain.train.checkpoint.reader import read_checkpoint, read_manifest

log = logging.getLogger("posttrain")

_NAME = re.compile(r"step-(\d{9,})")

_REPLACED = ".replaced"


class CheckpointFolder:
    """Stores checkpoints by step. Every method but `fresh` needs the lock of `locked`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._temporary = path / "tmp"

    def make(self) -> None:
        """Creates the folder, and syncs its name to disk.

        Raises:
            UserError: the disk refused.
        """
        make_folder(self.path)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Locks the folder against other threads and processes, and completes what a kill interrupted.

        Raises:
            UserError: the disk refused.
        """
        if not self.path.is_dir():  # nothing to change
            yield
            return
        lock = FileLock(self.path / ".lock", thread_local=False)
        with disk_errors(self.path):
            lock.acquire()
            try:
                self._finish_replacing()
                yield
            finally:
                lock.release()

    @contextmanager
    def fresh(self) -> Iterator[Path]:
        """Yields an empty folder to write a checkpoint into; removed afterwards unless it was committed."""
        remove_abandoned_folders(self._temporary)
        with temporary_folder(self._temporary) as folder:
            yield folder

    def steps(self) -> list[int]:
        """Returns the steps of all checkpoints, whole or not, the newest last."""
        if not self.path.is_dir():
            return []
        names = (_NAME.fullmatch(path.name) for path in self.path.iterdir())
        return sorted(int(name[1]) for name in names if name)

    def commit(self, fresh: Path, step: int) -> Path:
        """Renames a finished folder to its final name, in place of an older checkpoint of the same step."""
        folder = self._place(step)
        if folder.exists():
            folder.rename(self._replaced(folder))
        fresh.rename(folder)
        sync_folder(self.path)
        self._finish_replacing()
        return folder

    def first_valid(self, steps: Iterable[int]) -> Checkpoint | None:
        """Returns the first whole checkpoint of these steps; damaged ones before it are logged and put aside."""
        damaged = False
        for step in steps:
            try:
                checkpoint = read_checkpoint(self._place(step), step)
            except DamagedCheckpoint as damage:
                self._put_aside(step, damage)
                damaged = True
                continue
            if damaged:
                log.warning("using the checkpoint of step %d instead", step)
            return checkpoint
        if damaged:
            log.warning("no other checkpoint to start from")
        return None

    def prune(self, keep_last: int, committed: int, best: Callable[[int], int | None]) -> None:
        """Removes all checkpoints but the newest ``keep_last``; ``committed``, just verified, always stays.

        Of each that stays, the one that ``best`` names stays too.
        """
        whole = []
        for step in self.steps():
            try:
                read_manifest(self._place(step), step)
                whole.append(step)
            except DamagedCheckpoint as damage:
                self._put_aside(step, damage)
        newest = {*whole[-keep_last:], committed}
        for step in set(whole) - newest - {best(step) for step in newest}:
            self.remove(step)
        for old in sorted(self.path.glob("damaged-*"))[:-1]:  # the last one stays for inspection
            self._discard(old)

    def remove(self, step: int) -> None:
        """Removes the checkpoint of a step."""
        self._discard(self._place(step))

    def _place(self, step: int) -> Path:
        return self.path / f"step-{step:09d}"

    def _put_aside(self, step: int, damage: DamagedCheckpoint) -> None:
        """Renames an unusable checkpoint, so that it does not count among those to keep."""
        folder = self._place(step)
        names = itertools.chain([f"damaged-{step:09d}"], (f"damaged-{step:09d}.{n}" for n in itertools.count(1)))
        aside = next(self.path / free for free in names if not (self.path / free).exists())
        folder.rename(aside)
        sync_folder(self.path)
        log.warning("checkpoint %s is damaged (%s) and was put aside as %s", folder.name, damage, aside.name)

    def _replaced(self, folder: Path) -> Path:
        return folder.with_name(f"{folder.name}{_REPLACED}")

    def _finish_replacing(self) -> None:
        """Completes a replacement that a kill interrupted between the two renames of `commit`."""
        # The older checkpoint counts until the new one has its name.
        for old in self.path.glob(f"step-*{_REPLACED}"):
            folder = old.with_name(old.name.removesuffix(_REPLACED))
            if folder.exists():
                self._discard(old)
            else:
                old.rename(folder)
                sync_folder(self.path)

    def _discard(self, folder: Path) -> None:
        """Removes a folder."""
        # Renamed away first: a kill leaves it whole or gone, never half.
        with temporary_folder(self._temporary) as trash:
            folder.rename(trash / folder.name)
            sync_folder(self.path)
