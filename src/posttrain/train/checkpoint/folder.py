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
    """A checkpoint that is there; metric: what it was saved with, finite, or None."""

    step: int
    metric: float | None


class CheckpointFolder:
    """Checkpoints by step. Every call but ``fresh`` is for those who hold ``locked``."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._temporary = path / "tmp"

    def make(self) -> None:
        """Make the folder, and have its name on the disk.

        Raises:
            UserError: the disk refused.
        """
        if not self.path.is_dir():
            make_folder(self.path)
            sync_folder(self.path.parent)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other threads and processes from changing the folder; what a kill interrupted is put right first.

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
        """An empty folder to write a checkpoint into; gone afterwards unless it was committed."""
        remove_abandoned_folders(self._temporary)
        with temporary_folder(self._temporary) as folder:
            yield folder

    def steps(self) -> list[int]:
        """The steps whose checkpoints are there, the newest last; whether they are whole is not looked at."""
        if not self.path.is_dir():
            return []
        names = (_NAME.fullmatch(path.name) for path in self.path.iterdir())
        return sorted(int(name[1]) for name in names if name)

    def commit(self, fresh: Path, step: int) -> Path:
        """Give a finished folder its name, and return it; an older checkpoint of the same step is there until then."""
        folder = self._place(step)
        if folder.exists():
            folder.rename(self._replaced(folder))
        fresh.rename(folder)
        sync_folder(self.path)
        self._finish_replacing()
        return folder

    def first_good(self, steps: Iterable[int]) -> Checkpoint | None:
        """The first of these checkpoints that is whole; damaged ones before it are named in the log and put aside."""
        damaged = False
        for step in steps:
            try:
                checkpoint = read_checkpoint(self._place(step), step)
            except DamagedCheckpoint as damage:
                self._put_aside(step, damage)
                damaged = True
                continue
            if damaged:
                log.warning("going back to the checkpoint of step %d", step)
            return checkpoint
        if damaged:
            log.warning("no other checkpoint to go back to")
        return None

    def saved(self) -> list[SavedCheckpoint]:
        """Step and metric of the checkpoints whose manifests hold; the others are put aside."""
        checkpoints = []
        for step in self.steps():
            try:
                checkpoints.append(SavedCheckpoint(step, read_manifest(self._place(step), step).metric))
            except DamagedCheckpoint as damage:
                self._put_aside(step, damage)
        return checkpoints

    def prune(self, config: CheckpointConfig, committed: int) -> None:
        """Remove what is not to be kept; ``committed`` is, as it is known to be good."""
        saved = self.saved()
        keep = steps_to_keep(saved, config) | {committed}
        for checkpoint in saved:
            if checkpoint.step not in keep:
                self.remove(checkpoint.step)
        for old in sorted(self.path.glob("damaged-*"))[:-1]:  # the last one stays for whoever wants to look at it
            self._discard(old)

    def remove(self, step: int) -> None:
        """Remove the checkpoint of a step."""
        self._discard(self._place(step))

    def _place(self, step: int) -> Path:
        return self.path / f"step-{step:09d}"

    def _put_aside(self, step: int, damage: DamagedCheckpoint) -> None:
        """Rename a checkpoint that cannot be used, so that it takes no good one's place among those kept."""
        folder = self._place(step)
        # What another version wrote is not pruned: only this version cannot read it.
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
        """Between the two renames of ``commit`` the older checkpoint of the step is the one that counts."""
        for old in self.path.glob(f"step-*{_REPLACED}"):
            folder = old.with_name(old.name.removesuffix(_REPLACED))
            if folder.exists():
                self._discard(old)
            else:
                old.rename(folder)
                sync_folder(self.path)

    def _discard(self, folder: Path) -> None:
        """Take a folder out of sight by one rename, then remove it: a kill leaves it whole or gone."""
        with temporary_folder(self._temporary) as trash:
            folder.rename(trash / folder.name)
            sync_folder(self.path)


def steps_to_keep(saved: Iterable[SavedCheckpoint], config: CheckpointConfig) -> set[int]:
    """The steps that are kept: the newest, the best and every K-th, as the config asks."""
    saved = list(saved)
    steps = sorted(checkpoint.step for checkpoint in saved)
    keep = set(steps[-config.keep_last :])
    if config.keep_best:
        keep |= set(rank_by_metric(saved, config)[:1])
    if config.keep_every:
        keep |= {step for step in steps if step % config.keep_every == 0}
    return keep


def rank_by_metric(saved: Iterable[SavedCheckpoint], config: CheckpointConfig) -> list[int]:
    """The steps of those that have a metric, the best first; of equals the earlier first."""
    sign = 1 if config.mode == "min" else -1
    return [
        step
        for _, step in sorted(
            (sign * checkpoint.metric, checkpoint.step) for checkpoint in saved if checkpoint.metric is not None
        )
    ]
