"""The folders of a study's trials, with their checkpoints."""

import logging
import shutil
from collections.abc import Container
from pathlib import Path

from posttrain.store.errors import UserError
from posttrain.store.files import (
    disk_errors,
    remove_abandoned_folders,
    remove_tree,
    sync_folder,
    sync_tree,
    temporary_folder,
)
from posttrain.tune.study import Study
from posttrain.tune.trial import TrialState, rank

log = logging.getLogger("posttrain")


class TrialFolders:
    """Keeps the folders of trials that may continue, and of the best one.

    Args:
        study: says which those are.
        folder: has a folder for each trial.
    """

    def __init__(self, study: Study, folder: Path) -> None:
        self._study, self._folder = study, folder
        self._copies = folder / "copies"
        self._kept = self._best_finished()
        self._largest = 0  # bytes of the largest folder of a paused trial
        remove_abandoned_folders(self._copies)

    def path(self, number: int) -> Path:
        """Returns the folder of a trial, whether it exists or not."""
        return self._folder / f"{number:04d}"

    def copy(self, parent: int, child: int) -> None:
        """Copies a trial's folder for another, as a whole or, if the process is killed, not at all."""
        target = self.path(child)
        with temporary_folder(self._copies) as folder, disk_errors(target):
            # Links are followed: the parent's folder changes.
            shutil.copytree(self.path(parent), folder / target.name, ignore_dangling_symlinks=True)
            sync_tree(folder / target.name)
            (folder / target.name).replace(target)
            sync_folder(target.parent)

    def make_room(self, running: int, needed: Container[int]) -> None:
        """Removes folders of paused trials, the worst first, until every running trial can write another checkpoint.

        Without its folder a paused trial begins again and comes to the same values. That costs time; a full disk would
        end the study.

        Args:
            running: the number of trials that run.
            needed: trials whose folders stay, besides the best one's.
        """
        if shutil.disk_usage(self._folder).free >= running * self._largest:
            return
        best = self._study.best
        paused = [trial for trial in self._study.trials if trial.state is TrialState.PAUSED]
        for trial in sorted(paused, key=lambda trial: rank(trial, self._study.maximize), reverse=True):
            if trial.number in needed or trial is best or not self.path(trial.number).exists():
                continue
            log.warning("  the disk is almost full: removed the checkpoint of trial %d, which is paused", trial.number)
            remove_tree(self.path(trial.number))
            if shutil.disk_usage(self._folder).free >= running * self._largest:
                return

    def measure(self, number: int) -> None:
        """Notes what a paused trial takes of the disk."""
        files = self.path(number).rglob("*")
        self._largest = max(self._largest, sum(file.stat().st_size for file in files if file.is_file()))

    def clean_up(self, number: int) -> None:
        """Removes the folder of a trial that has ended, and of the best one before, unless it is the best one."""
        before, self._kept = self._kept, self._best_finished()
        for other in {number, before}:
            if other is None or other == self._kept:
                continue
            if self._study.trials[other].ended:
                remove_tree(self.path(other))

    def _best_finished(self) -> int | None:
        best = self._study.best
        return best.number if best is not None and best.state is TrialState.FINISHED else None


def check_trials(folder: Path, count: int) -> None:
    """Raises a `UserError` if there are checkpoints of trials that the study lacks: others would continue there."""
    numbers = sorted(int(path.name) for path in folder.iterdir() if path.name.isdecimal())
    if numbers and numbers[-1] >= count:
        what = f"has the folder of trial {numbers[-1]}, and the study {count} trials: its database is another one"
        raise UserError(what, where=str(folder), fix="name another --out")
