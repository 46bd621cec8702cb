"""Saves, prunes and finds checkpoints while training runs."""

import logging
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Self

from torch import Tensor

from posttrain.store.errors import UserError
from posttrain.store.files import disk_errors
from posttrain.train.checkpoint.config import CheckpointConfig
from posttrain.train.checkpoint.folder import CheckpointFolder
from posttrain.train.checkpoint.format import Checkpoint, encode_state
from posttrain.train.checkpoint.snapshot import Snapshots, lower_priority, run_in_thread, to_host
from posttrain.train.checkpoint.writer import StepsFile, write_checkpoint
from posttrain.train.monitor.metrics import StepValues

log = logging.getLogger("posttrain")


class Checkpoints:
    """Manages the checkpoints of one training in one folder.

    For one thread. ``close``, or the end of its ``with`` block, waits for the checkpoint that is still being written.
    A kill at any instant, a full disk or another process in the same folder leave the earlier checkpoints whole.

    Args:
        folder: made by the first save.
        config: when checkpoints are saved, and which are kept.
        best: returns which of some steps, from the first one on, the training may go back to at its end; its checkpoint
            is kept too.
    """

    def __init__(
        self,
        folder: Path,
        config: CheckpointConfig | None = None,
        best: Callable[[Sequence[StepValues]], int | None] = lambda steps: None,
    ) -> None:
        self.folder, self._best = folder, best
        self.config = config or CheckpointConfig(background=False)  # without a config nobody closes it
        self._folder = CheckpointFolder(folder)
        self._snapshots = Snapshots()
        self._writing: Future[None] | None = None
        # Two files that grow in turns: damage to one leaves the checkpoint in the other whole.
        self._steps_files: deque[StepsFile] = deque(maxlen=min(2, self.config.keep_last))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def prepare(self, tensors: Mapping[str, Tensor]) -> None:
        """Allocates the snapshot buffers in the background, so that the first save takes no longer than the others."""
        if self.config.background and self.config.enabled and self._writing is None:
            self._snapshots.prepare(dict(tensors))

    def save(self, step: int, checkpoint: Checkpoint) -> None:
        """Saves a checkpoint; its tensors may change as soon as this returns.

        It waits for one that is still being written. Afterwards the checkpoints that the config does not keep are
        removed. A full disk in the background is logged, and costs checkpoints, not the training.

        Args:
            step: number of optimiser steps so far; a checkpoint of the same step is replaced.
            checkpoint: tensors on any device, contiguous or not, JSON, and all steps so far.

        Raises:
            UserError: the folder cannot be created, or the disk is full and the config not ``background``.
            WorkError: the data read back differ from the data written, now or in the background before.
            TypeError: the state is not JSON.
            ValueError: a tensor is sparse or of a dtype that cannot be stored, or the step is negative.
        """
        if step < 0:
            raise ValueError(f"step {step} is negative")
        self._finish()
        # Encoded in this thread, before training changes what it holds.
        state, steps = encode_state(checkpoint.state), list(checkpoint.steps)
        self._folder.make()
        if self.config.background:
            tensors = self._snapshots.take(checkpoint.tensors)
            self._writing = run_in_thread(lambda: self._write_in_background(step, tensors, state, steps))
        else:
            self._write(step, to_host(checkpoint.tensors), state, steps)

    def close(self) -> None:
        """Waits for the checkpoint that is being written, and frees the buffers.

        Raises:
            WorkError: the data read back differ from the data written.
        """
        try:
            self._finish()
        finally:
            self._snapshots = Snapshots()

    def latest(self) -> Checkpoint | None:
        """Returns the newest whole checkpoint, or None; damaged ones are logged and put aside."""
        with self._idle_folder() as folder:
            return folder.first_valid(reversed(folder.steps()))

    def at(self, step: int) -> Checkpoint | None:
        """Returns the checkpoint of this step, or None if it is missing or damaged."""
        with self._idle_folder() as folder:
            return folder.first_valid(existing for existing in folder.steps() if existing == step)

    def steps(self) -> list[int]:
        """Returns the steps of all checkpoints, the newest last; they may be damaged."""
        with self._idle_folder() as folder:
            return folder.steps()

    def rewind(self, step: int) -> Checkpoint | None:
        """Returns the newest whole checkpoint of at most this step, and removes all later ones."""
        # Training takes another course from here: a kill must not resume from the one that was given up.
        with self._idle_folder() as folder:
            checkpoint = folder.first_valid(existing for existing in reversed(folder.steps()) if existing <= step)
            for later in reversed(folder.steps()):
                if checkpoint is not None and later > step:
                    folder.remove(later)
            return checkpoint

    def _write_in_background(
        self, step: int, tensors: Mapping[str, Tensor], state: bytes, steps: Sequence[StepValues]
    ) -> None:
        try:
            lower_priority()
            self._write(step, tensors, state, steps)
        except UserError as refusal:
            why = f"{refusal.where}: {refusal.what}" if refusal.where else refusal.what
            log.warning("no checkpoint of step %d (%s): training continues without it", step, why)
        except Exception as error:
            # Logged at once, as the training may end before it waits for the outcome.
            log.warning("saving the checkpoint of step %d failed: %s", step, error)
            raise

    def _write(self, step: int, tensors: Mapping[str, Tensor], state: bytes, steps: Sequence[StepValues]) -> None:
        with disk_errors(self.folder), self._folder.fresh() as fresh:
            manifest = write_checkpoint(fresh, step, tensors, state, steps, self._free_steps_file())
            with self._folder.locked():
                # Committed before anything is pruned: a kill in between leaves one checkpoint too many, never too few.
                committed = self._folder.commit(fresh, step)
                self._steps_files.append(StepsFile(committed, steps, manifest.steps_checksum))
                self._folder.prune(self.config.keep_last, step, lambda done: self._best(steps[:done]))

    def _free_steps_file(self) -> StepsFile | None:
        """Returns a steps file that may grow, because the newest checkpoint does not need it."""
        files = self._steps_files
        return files[0] if len(files) == files.maxlen and files[-1].folder.exists() else None

    def _finish(self) -> None:
        """Waits for the checkpoint in flight, and raises its error."""
        if self._writing is not None:
            wait([self._writing])  # an interrupt leaves it in flight
            done, self._writing = self._writing, None
            done.result()

    @contextmanager
    def _idle_folder(self) -> Iterator[CheckpointFolder]:
        """Yields the locked folder, once nothing is written into it; the next save or close raises that error."""
        if self._writing is not None:
            wait([self._writing])
        with self._folder.locked():
            yield self._folder
