"""The folder of all checkpoints: each appears and disappears by one rename; old ones are pruned."""

import itertools
import logging
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock

from posttrain.store.files import disk_errors, make_folder, remove_abandoned_folders, sync_folder, temporary_folder
from posttrain.train.checkpoint.config import CheckpointConfig
from posttrain.train.checkpoint.format import Checkpoint, DamagedCheckpoint, UnsupportedFormat
from posttrain.train.checkpoint.reader import read_checkpoint, read_manifest

log = logging.getLogger("posttrain")

_NAME = re.compile(r"step-(\d{9,})")

_REPLACED = ".replaced"


@dataclass(frozen=True)
class SavedCheckpoint:
    """A checkpoint in the folder, and the metric that it was saved with: finite or None."""

    step: int
    metric: float | None


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

    def saved(self) -> list[SavedCheckpoint]:
        """Returns step and metric of all checkpoints with a valid manifest; the others are put aside."""
        checkpoints = []
        for step in self.steps():
            try:
                checkpoints.append(SavedCheckpoint(step, read_manifest(self._place(step), step).metric))
            except DamagedCheckpoint as damage:
                self._put_aside(step, damage)
        return checkpoints

    def prune(self, config: CheckpointConfig, committed: int) -> None:
        """Removes all checkpoints but those to keep; ``committed``, just verified, always stays."""
        saved = self.saved()
        keep = steps_to_keep(saved, config) | {committed}
        for checkpoint in saved:
            if checkpoint.step not in keep:
                self.remove(checkpoint.step)
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
        # A checkpoint of another version is never pruned: that version can still read it.
        name = f"{'other-format' if isinstance(damage, UnsupportedFormat) else 'damaged'}-{step:09d}"
        names = itertools.chain([name], (f"{name}.{number}" for number in itertools.count(1)))
        aside = next(self.path / free for free in names if not (self.path / free).exists())
        folder.rename(aside)
        sync_folder(self.path)
        state = "cannot be used" if isinstance(damage, UnsupportedFormat) else "is damaged"
        log.warning("checkpoint %s %s (%s) and was put aside as %s", folder.name, state, damage, aside.name)

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


def steps_to_keep(saved: Iterable[SavedCheckpoint], config: CheckpointConfig) -> set[int]:
    """Selects the steps to keep: the newest, the best and every K-th, as the config says."""
    saved = list(saved)
    steps = sorted(checkpoint.step for checkpoint in saved)
    keep = set(steps[-config.keep_last :])
    if config.keep_best:
        keep |= set(rank_by_metric(saved, config)[:1])
    if config.keep_every:
        keep |= {step for step in steps if step % config.keep_every == 0}
    return keep


def rank_by_metric(saved: Iterable[SavedCheckpoint], config: CheckpointConfig) -> list[int]:
    """Sorts the steps with a metric, the best first; of equals the earlier first."""
    sign = 1 if config.mode == "min" else -1
    return [
        step
        for _, step in sorted(
            (sign * checkpoint.metric, checkpoint.step) for checkpoint in saved if checkpoint.metric is not None
        )
    ]
