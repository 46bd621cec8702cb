"""Samples the records of each optimiser step: phases in order, each with its own mix, length and learning rate."""

import logging
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import ceil
from typing import Any

import numpy as np

from posttrain.store.errors import UserError
from posttrain.train.data.config import PhaseConfig
from posttrain.train.data.curriculum import (
    AdaptiveCurriculum,
    competence,
    fully_open_step,
)
from posttrain.train.data.epoch_plan import EpochPlan
from posttrain.train.data.mix import MixPart, mix_parts

log = logging.getLogger("posttrain")

# Rise of the share of open records, between two steps, from which on they are other data.
_JUMP = 0.05

_FIX = "leave train.phases as they were, or train again in another folder"


@dataclass(frozen=True)
class StepPosition:
    """The position of a step in its phase and epoch.

    Args:
        phase: number of the phase, from 0.
        step: step within the phase, from 0.
        steps: steps of the whole phase.
        epoch: finished passes over the data, in all phases; under a mix or a curriculum a pass is as many steps as
            read the number of the phase's records.
        config: settings of the phase.
    """

    phase: int
    step: int
    steps: int
    epoch: int
    config: PhaseConfig


class PhaseSampler:
    """Samples the rows of one phase, whose first pass is number ``first_epoch`` of the training."""

    def __init__(
        self,
        config: PhaseConfig,
        parts: Sequence[MixPart],
        batch_size: int,
        seed: int | None,
        first_epoch: int,
        difficulties: np.ndarray | None,
    ) -> None:
        self.config, self.first_epoch, self._batch_size, self._seed = config, first_epoch, batch_size, seed or 0
        self.passes = EpochPlan(parts, batch_size, seed, first_epoch)
        # Steps given in the config win; else whole passes.
        self.steps = config.steps or self.passes.batches * (config.epochs or 1)
        curriculum, rows = config.curriculum, parts[0].rows
        # From this step on all records come in passes: a curriculum ends as an ordinary training.
        self._open = 0 if curriculum is None else min(self.steps, fully_open_step(curriculum, self.steps))
        self._ranked = None
        self.pacing: AdaptiveCurriculum | None = None
        """A curriculum that depends on the losses."""
        if difficulties is not None:  # the easiest first; a stable sort, so that ties do not depend on the platform
            self._ranked = rows[np.argsort(difficulties[rows], kind="stable")]
        if curriculum and curriculum.name == "adaptive":
            self.pacing = AdaptiveCurriculum(curriculum, self.steps)

    @property
    def decided(self) -> int:
        """Number of the phase's steps whose rows are known."""
        if self.pacing is None or self.pacing.decided >= self._open:
            return self.steps
        return self.pacing.decided

    def rows(self, step: int) -> np.ndarray:
        """int64 [at most batch size], for a step that is decided."""
        # From here on passes are counted from the end of the curriculum, so that each record is met as often as any
        # other.
        if self._ranked is None or step >= self._open:
            return self.passes.rows(step - self._open)
        # At least a batch is open, or the first steps would be smaller than the others.
        opened = self._ranked[: max(self._batch_size, ceil(self.open_share(step) * len(self._ranked)))]
        return self._draw(step, opened)

    def open_share(self, step: int) -> float:
        """Returns the share of the phase's records that a decided step is drawn from."""
        if self.config.curriculum is None or step >= self._open:
            return 1.0
        if self.pacing is None:
            return competence(self.config.curriculum, step, self.steps)
        return self.pacing.competence(step)

    def observe(self, step: int, loss: float) -> None:
        """Passes a step's loss to the curriculum."""
        if self.pacing is not None:
            self.pacing.observe(step, loss)

    def load_state(self, state: Mapping[str, Any], where: str, fix: str) -> None:
        """Resumes the curriculum from its state.

        Raises:
            UserError: the state is of another curriculum; the error names ``where`` and ``fix``.
        """
        if self.pacing is not None and state.keys() != self.pacing.state().keys():
            raise UserError("the checkpoint is of another curriculum", where=where, fix=fix)
        if self.pacing is not None:
            self.pacing.load_state(state)

    def _draw(self, step: int, open_rows: np.ndarray) -> np.ndarray:
        """Draws a batch from the open rows."""
        # Seeded by the step: any process draws any step without having drawn those before it.
        generator = np.random.default_rng([self._seed, self.first_epoch, step, 0, 0, 1])
        size = min(self._batch_size, len(open_rows))
        rows: np.ndarray = open_rows[generator.choice(len(open_rows), size, replace=False)]
        return rows


class BatchSampler:
    """Samples the rows of every optimiser step from its arguments, and from the losses if a curriculum uses them.

    Args:
        count: number of records; their rows are 0..count-1.
        batch_size: rows per step; the last step of a pass may have fewer.
        seed: seed of all shuffling; None keeps the records' order.
        phases: all phases, in their order.
        kinds: each record's kind, by ``mix_by``: ``{"source": ["a.jsonl", ...]}``.
        lengths: int [count], tokens of each record's longest sequence; needed for a phase with ``max_length``.
        difficulties: float [count], higher is harder; needed for a curriculum.

    Raises:
        UserError: no record is of a kind that a mix names, or all records are too long for a phase.
        ValueError: kinds, lengths or difficulties are missing or do not fit the records.
    """

    def __init__(
        self,
        count: int,
        batch_size: int,
        seed: int | None,
        phases: Sequence[PhaseConfig],
        *,
        kinds: Mapping[str, Sequence[str]] | None = None,
        lengths: np.ndarray | None = None,
        difficulties: np.ndarray | None = None,
    ) -> None:
        self.count, self.batch_size, self.seed = count, batch_size, seed
        self._phases: list[PhaseSampler] = []
        self._starts = [0]
        epoch = 0
        for number, config in enumerate(phases):
            where, rows = f"train.phases.{number}", np.arange(count)
            if config.max_length is not None:
                rows = np.flatnonzero(_check_complete("lengths", lengths, count) <= config.max_length)
                if not len(rows):
                    raise UserError("all records are longer", where=f"{where}.max_length", fix="raise it")
            parts = [MixPart(rows, len(rows))]
            if config.mix is not None:
                record_kinds = _check_complete(config.mix_by, (kinds or {}).get(config.mix_by), count)
                parts = mix_parts(config, record_kinds, rows, f"{where}.mix", partial(_pass_count, config, batch_size))
            # Said once, as records that no phase reads are usually a mistake in the config.
            if unused := count - sum(len(part.rows) for part in parts):
                log.info("  %s: %d of %d records are not used", where, unused, count)
            ranks = None if config.curriculum is None else _check_complete("difficulties", difficulties, count)
            phase = PhaseSampler(config, parts, batch_size, seed, epoch, ranks)
            self._phases.append(phase)
            self._starts.append(self._starts[-1] + phase.steps)
            # The next phase begins a pass of its own, with another shuffle.
            epoch += ceil(phase.steps / phase.passes.batches)

    @property
    def steps(self) -> int:
        """Optimiser steps of all phases."""
        return self._starts[-1]

    @property
    def phases(self) -> list[StepPosition]:
        """The position of every phase's first step."""
        return [self.position(start) for start in self._starts[:-1]]

    @property
    def starts(self) -> list[int]:
        """First step of each phase, and the end of the last one."""
        return list(self._starts)

    @property
    def decided(self) -> int:
        """Number of steps whose rows are known; those of later ones depend on losses that were not observed yet."""
        count = 0
        for phase in self._phases:
            count += phase.decided
            # Later phases wait, too: prefetching must not skip steps.
            if phase.decided < phase.steps:
                break
        return count

    def position(self, step: int) -> StepPosition:
        """Returns the position of a step.

        Raises:
            IndexError: the training has no such step.
        """
        number, phase, within = self._locate(step)
        epoch = phase.first_epoch + within // phase.passes.batches
        return StepPosition(number, within, phase.steps, epoch, phase.config)

    def rows(self, step: int) -> list[int]:
        """Returns the rows of a decided step, in their order.

        Raises:
            IndexError: the training has no such step, or it is not decided.
        """
        _, phase, within = self._locate(step)
        if within >= phase.decided:
            raise IndexError(f"the rows of step {step} are not decided")
        rows: list[int] = phase.rows(within).tolist()
        return rows

    def changes_data(self, step: int) -> bool:
        """Returns whether a decided step begins a phase, or a curriculum opens many records with it."""
        _, phase, within = self._locate(step)
        if within == 0:
            return step > 0
        return phase.open_share(within) - phase.open_share(within - 1) >= _JUMP

    @property
    def follows_losses(self) -> bool:
        """True if `observe` must be called: a curriculum depends on the losses."""
        return any(phase.pacing is not None for phase in self._phases)

    def observe(self, step: int, loss: float) -> None:
        """Reports a step's loss, in the steps' order; adaptive curricula depend on it."""
        _, phase, within = self._locate(step)
        phase.observe(within, loss)

    def seen(self, steps: int | None = None, *, since: int = 0) -> np.ndarray:
        """int64 [count]: uses of each record in the first ``steps`` steps, or in all that are decided.

        Args:
            since: the first step that counts.
        """
        times = np.zeros(self.count, np.int64)
        end = self.decided if steps is None else steps
        # Counted step by step: `np.add.at` adds a row again that a step has twice.
        for step in range(since, end):
            np.add.at(times, self.rows(step), 1)
        return times

    def state(self) -> dict[str, Any]:
        """Returns the state for `load_state` as JSON: that of each phase's curriculum which follows the losses."""
        return {str(i): phase.pacing.state() for i, phase in enumerate(self._phases) if phase.pacing is not None}

    def load_state(self, state: Mapping[str, Any], steps: int) -> None:
        """Resumes from a state after ``steps`` steps, perhaps of a sampler with other arguments.

        Raises:
            UserError: its adaptive curricula have not observed the same steps as those of this sampler.
        """
        saved = {int(i): curriculum for i, curriculum in state.items()}
        own = {i: phase for i, phase in enumerate(self._phases) if phase.pacing is not None}
        every = {i: phase.pacing.config.every for i, phase in enumerate(self._phases) if phase.pacing is not None}
        # Compared by what was observed, not by the config: a curriculum that has not begun may still be changed.
        for i in sorted({*saved, *own}):
            saved_counts = (saved[i]["seen"], len(saved[i]["shares"]) - 1) if i in saved else (0, 0)
            own_counts = (0, 0)
            if i in own:
                seen = min(max(0, steps - self._starts[i]), own[i].steps)
                own_counts = (seen, seen // every[i])
            if saved_counts != own_counts:
                had, has = (
                    "seen {} steps and looked at them {} times".format(*counts) for counts in (saved_counts, own_counts)
                )
                what = f"the checkpoint's adaptive curriculum has {had}, and the config's would have {has}"
                raise UserError(what, where=f"train.phases.{i}", fix=_FIX)
        for i in sorted(own.keys() & saved):
            if saved[i]["seen"]:
                own[i].load_state(saved[i], f"train.phases.{i}", _FIX)

    def _locate(self, step: int) -> tuple[int, PhaseSampler, int]:
        if not 0 <= step < self.steps:
            raise IndexError(f"the training has {self.steps} steps, and no step {step}")
        number = bisect_right(self._starts, step) - 1
        return number, self._phases[number], step - self._starts[number]


def _pass_count(config: PhaseConfig, batch_size: int, count: int) -> int:
    """Returns the number of passes over ``count`` records that a phase makes, rounded up."""
    return config.epochs or ceil((config.steps or 1) / ceil(count / batch_size))


def _check_complete(name: str, values: Sequence[Any] | np.ndarray | None, count: int) -> np.ndarray:
    """Returns one value per record; raises a ValueError if they are missing, NaN or not as many."""
    array = np.asarray([] if values is None else values)
    if len(array) != count or (array.dtype.kind == "f" and np.isnan(array).any()):
        raise ValueError(f"the records' {name} are not known")
    return array
