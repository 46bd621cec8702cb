"""Which records each optimiser step reads: phases in order, each with its own mix, length and rate."""

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
from posttrain.train.data.curriculum import AdaptiveCurriculum, SelfPacedCurriculum, competence, fully_open_step
from posttrain.train.data.mix import EpochPlan, MixPart, mix_parts

log = logging.getLogger("posttrain")

_FIX = "leave train.stages and train.curriculum as they were, or train anew in another folder"


@dataclass(frozen=True)
class StepPosition:
    """Where a step stands.

    Args:
        stage: number of the stage, from 0.
        step: step within the stage, from 0.
        steps: of the whole stage.
        epoch: passes over the data that were finished before, in all stages; under a mix or a curriculum as many steps
            count as a pass as meet the number of the stage's records.
        config: of the stage.
    """

    stage: int
    step: int
    steps: int
    epoch: int
    config: PhaseConfig


class PhaseSampler:
    """The rows of one stage, whose first pass is number ``first_epoch`` of the training."""

    def __init__(
        self,
        config: "PhaseConfig",
        parts: Sequence[MixPart],
        batch_size: int,
        seed: int | None,
        first_epoch: int,
        difficulties: np.ndarray | None,
    ) -> None:
        self.config, self.first_epoch, self._batch_size, self._seed = config, first_epoch, batch_size, seed or 0
        self.passes = EpochPlan(parts, batch_size, seed, first_epoch)
        self.steps = config.steps or self.passes.batches * (config.epochs or 1)
        curriculum, rows = config.curriculum, parts[0].rows
        # From this step on all records come in passes.
        self._open = 0 if curriculum.name == "none" else min(self.steps, fully_open_step(curriculum, self.steps))
        self._ranked = None
        self.pacing: AdaptiveCurriculum | SelfPacedCurriculum | None = None
        """What goes by the losses."""
        if difficulties is not None:  # the easiest first; the records' order decides between equals
            self._ranked = rows[np.argsort(difficulties[rows], kind="stable")]
        if curriculum.name == "adaptive":
            self.pacing = AdaptiveCurriculum(curriculum, self.steps)
        elif curriculum.name == "self_paced":
            assert difficulties is not None
            self.pacing = SelfPacedCurriculum(
                curriculum,
                rows,
                difficulties,
                batch_size=min(batch_size, len(rows)),
                until=self._open,
                draw=self._drawn,
            )

    @property
    def decided(self) -> int:
        """How many of the stage's steps have known rows."""
        if self.pacing is None or self.pacing.decided >= self._open:
            return self.steps
        return self.pacing.decided

    def rows(self, step: int) -> np.ndarray:
        """int64 [at most batch size], for a step that is decided."""
        if self._ranked is None or step >= self._open:
            return self.passes.rows(step - self._open)
        if isinstance(self.pacing, SelfPacedCurriculum):
            return self.pacing.rows(step)
        if self.pacing is None:
            share = competence(self.config.curriculum, step, self.steps)
        else:
            share = self.pacing.competence(step)
        return self._drawn(step, self._ranked[: max(self._batch_size, ceil(share * len(self._ranked)))])

    def wants_unit_losses(self, step: int) -> bool:
        """Whether what a step measures of each of its records decides later ones."""
        return isinstance(self.pacing, SelfPacedCurriculum) and step < self._open

    def observe(self, step: int, loss: float, unit_losses: np.ndarray | None) -> None:
        """Tell of a step's loss, and of its records' own where they are wanted."""
        if isinstance(self.pacing, SelfPacedCurriculum):
            self.pacing.observe(step, unit_losses)
        elif self.pacing is not None:
            self.pacing.observe(step, loss)

    def load_state(self, state: Mapping[str, Any], where: str, fix: str) -> None:
        """Go on from what ``pacing`` had as its state.

        Raises:
            UserError: it was another one, and names ``where`` and ``fix``.
        """
        if ("shares" in state) != isinstance(self.pacing, AdaptiveCurriculum):
            raise UserError("the checkpoint is of another curriculum", where=where, fix=fix)
        if isinstance(self.pacing, SelfPacedCurriculum):
            self.pacing.load_state(state, where, fix)
        elif self.pacing is not None:
            self.pacing.load_state(state)

    def _drawn(self, step: int, known: np.ndarray) -> np.ndarray:
        """Rows of those that are open, drawn at random."""
        random = np.random.default_rng([self._seed, self.first_epoch, step, 0, 0, 1])
        drawn: np.ndarray = known[random.choice(len(known), min(self._batch_size, len(known)), replace=False)]
        return drawn


class BatchSampler:
    """The rows of every optimiser step: a function of the arguments, and of the losses where a curriculum goes by them.

    Args:
        count: number of records; their rows are 0..count-1.
        batch_size: rows a step; the last step of a pass may have fewer.
        seed: of all shuffling; None keeps the records' order.
        stages: what comes one after the other.
        kinds: for each ``mix_by`` what each record is: ``{"source": ["a.jsonl", ...]}``.
        lengths: int [count], tokens of each record's longest sequence; needed where a stage has a longest.
        difficulties: float [count], a higher one is harder; needed where a stage has a curriculum.

    Raises:
        UserError: a mix names what no record is, or all records are too long for a stage.
        ValueError: what a stage needs is missing or does not go with the records.
    """

    def __init__(
        self,
        count: int,
        batch_size: int,
        seed: int | None,
        stages: Sequence[PhaseConfig],
        *,
        kinds: Mapping[str, Sequence[str]] | None = None,
        lengths: np.ndarray | None = None,
        difficulties: np.ndarray | None = None,
    ) -> None:
        self.count, self.batch_size, self.seed = count, batch_size, seed
        self._stages: list[PhaseSampler] = []
        self._starts = [0]
        self._observed = 0  # steps
        epoch = 0
        for number, config in enumerate(stages):
            where, rows = f"train.stages.{number}", np.arange(count)
            if config.max_length is not None:
                rows = np.flatnonzero(_check_known("lengths", lengths, count) <= config.max_length)
                if not len(rows):
                    raise UserError("all records are longer", where=f"{where}.max_length", fix="raise it")
            parts = [MixPart(rows, len(rows))]
            if config.mix is not None:
                of = _check_known(config.mix_by, (kinds or {}).get(config.mix_by), count)
                parts = mix_parts(config, of, rows, f"{where}.mix", partial(_pass_count, config, batch_size))
            if left_out := count - sum(len(part.rows) for part in parts):
                log.info("  %s: %d of %d records are not met", where, left_out, count)
            ranks = None if config.curriculum.name == "none" else _check_known("difficulties", difficulties, count)
            stage = PhaseSampler(config, parts, batch_size, seed, epoch, ranks)
            self._stages.append(stage)
            self._starts.append(self._starts[-1] + stage.steps)
            epoch += ceil(stage.steps / stage.passes.batches)

    @property
    def steps(self) -> int:
        """Optimiser steps of all stages."""
        return self._starts[-1]

    @property
    def stages(self) -> list[StepPosition]:
        """The first step of every stage."""
        return [self.place(start) for start in self._starts[:-1]]

    @property
    def starts(self) -> list[int]:
        """Where each stage starts, and where the last one ends, in steps."""
        return list(self._starts)

    @property
    def decided(self) -> int:
        """How many steps' rows are known; those of later ones hang on losses that were not observed yet."""
        known = 0
        for stage in self._stages:
            known += stage.decided
            if stage.decided < stage.steps:
                break
        return known

    def place(self, step: int) -> StepPosition:
        """Where a step stands.

        Raises:
            IndexError: the training has no such step.
        """
        number, stage, within = self._at(step)
        return StepPosition(
            number, within, stage.steps, stage.first_epoch + within // stage.passes.batches, stage.config
        )

    def rows(self, step: int) -> list[int]:
        """The rows of a step that is decided, in their order.

        Raises:
            IndexError: the training has no such step, or it is not decided.
        """
        _, stage, within = self._at(step)
        if within >= stage.decided:
            raise IndexError(f"the rows of step {step} are not decided")
        found: list[int] = stage.rows(within).tolist()
        return found

    def wants_unit_losses(self, step: int) -> bool:
        """Whether `observe` needs the loss of each of a step's rows, for a self-paced curriculum."""
        _, stage, within = self._at(step)
        return stage.wants_unit_losses(within)

    def observe(self, step: int, loss: float, unit_losses: np.ndarray | None = None) -> None:
        """Tell of a step's loss, in the steps' order; only adaptive and self-paced curricula listen.

        Args:
            unit_losses: float [rows of the step], nats a supervised token of each, where they are wanted.
        """
        _, stage, within = self._at(step)
        self._observed = step + 1
        stage.observe(within, loss, unit_losses)

    def seen(self, steps: int | None = None, *, samples: int = 0, since: int = 0) -> np.ndarray:
        """int64 [count]: how often each record is met in the first ``steps`` steps, or in all that are decided.

        Args:
            samples: and in so many samples of the step after them.
            since: the first step that counts.
        """
        times = np.zeros(self.count, np.int64)
        end = self.decided if steps is None else steps
        for step in range(since, end):
            np.add.at(times, self.rows(step), 1)
        if samples:
            np.add.at(times, self.rows(end)[:samples], 1)
        return times

    def state(self) -> dict[str, Any]:
        """What `load_state` takes, as JSON values: how many steps were observed, and what each stage knows of them."""
        known = {str(at): one.pacing.state() for at, one in enumerate(self._stages) if one.pacing is not None}
        return {"steps": self._observed, **known}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state` gave, perhaps of an order with other arguments.

        Raises:
            UserError: its adaptive and self-paced curricula are not those that have seen these steps here.
        """
        steps, saved = state["steps"], {int(at): of for at, of in state.items() if at != "steps"}
        own = {at: one for at, one in enumerate(self._stages) if one.pacing is not None}
        for at in sorted({*saved, *own}):
            there = (saved[at]["seen"], _look_count(saved[at])) if at in saved else (0, 0)
            here = (0, 0)
            if at in own:
                seen = min(max(0, steps - self._starts[at]), own[at].steps)
                here = (seen, seen // own[at].config.curriculum.every)
            if there != here:
                had, has = ("seen {} steps and looked at them {} times".format(*one) for one in (there, here))
                what = f"the checkpoint's adaptive curriculum has {had}, and the config's would have {has}"
                raise UserError(what, where=f"train.stages.{at}", fix=_FIX)
        for at in sorted(own.keys() & saved):
            if saved[at]["seen"]:
                own[at].load_state(saved[at], f"train.stages.{at}", _FIX)
        self._observed = steps

    def _at(self, step: int) -> tuple[int, PhaseSampler, int]:
        if not 0 <= step < self.steps:
            raise IndexError(f"the training has {self.steps} steps, and no step {step}")
        number = bisect_right(self._starts, step) - 1
        return number, self._stages[number], step - self._starts[number]


def _pass_count(config: PhaseConfig, batch_size: int, count: int) -> int:
    """How many passes of so many records a stage has, a part of one counted as one."""
    return config.epochs or ceil((config.steps or 1) / ceil(count / batch_size))


def _look_count(state: Mapping[str, Any]) -> int:
    """How often a curriculum that goes by losses has looked at them."""
    return int(state["looks"]) if "looks" in state else len(state["shares"]) - 1


def _check_known(name: str, values: Sequence[Any] | np.ndarray | None, count: int) -> np.ndarray:
    """What is known of each record, or a ValueError."""
    found = np.asarray([] if values is None else values)
    if len(found) != count or (found.dtype.kind == "f" and np.isnan(found).any()):
        raise ValueError(f"the records' {name} are not known")
    return found


def mix_counts(
    order: BatchSampler, kinds: Mapping[str, Sequence[str]], steps: int | None = None, *, samples: int = 0
) -> list[dict[str, Any]]:
    """What the stages with a mix meet of each kind.

    Args:
        order: of the training.
        kinds: for each ``mix_by`` what each record is.
        steps: count the first so many steps; None: all that are decided.
        samples: and so many samples of the step after them.

    Returns:
        For each stage with a mix ``stage`` (its number), ``by`` and ``kinds``: by name ``records`` (how many there
        are), ``met`` (samples), ``epochs`` (``met`` a record), ``fewest`` and ``most`` (how often one record is met).
    """
    end = order.decided if steps is None else steps
    found = []
    places, starts = order.stages, order.starts
    for number, (place, first, last) in enumerate(zip(places, starts[:-1], starts[1:], strict=True)):
        if place.config.mix is None:
            continue
        begun = first <= end < last
        times = order.seen(min(end, last), samples=samples if begun else 0, since=min(first, end))
        of = np.asarray(kinds[place.config.mix_by])
        names = sorted(set(of.tolist())) if place.config.mix == "sizes" else list(place.config.mix)
        found.append(
            {
                "stage": number,
                "by": place.config.mix_by,
                "kinds": {name: _kind_counts(times[of == name]) for name in names},
            }
        )
    return found


def _kind_counts(times: np.ndarray) -> dict[str, Any]:
    met = int(times.sum())
    return {
        "records": len(times),
        "met": met,
        "epochs": met / len(times),
        "fewest": int(times.min()),
        "most": int(times.max()),
    }
