"""Which records each optimiser step meets: stages one after another, each with its own mix, length and rate."""

import logging
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import ceil
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from pydantic import Field, model_validator

from posttrain.store.errors import UserError
from posttrain.train.curriculum import CurriculumConfig
from posttrain.train.mix import MixConfig, parts_of
from posttrain.train.objectives.registry import OBJECTIVES
from posttrain.train.passes import Part
from posttrain.train.stage_rows import StageRows

if TYPE_CHECKING:  # it holds the sections of this module
    from posttrain.train.config import TrainConfig

log = logging.getLogger("posttrain")

_FIX = "leave train.stages and train.curriculum as they were, or train anew in another folder"


class StageConfig(MixConfig):
    """One part of a training in several."""

    epochs: int | None = Field(None, ge=1, description="Passes over the stage's records; or give `steps`.")
    steps: int | None = Field(None, ge=1, description="Optimiser steps.")
    learning_rate: float | None = Field(None, gt=0, description="Peak learning rate; none: the training's.")
    max_length: int | None = Field(None, ge=8, description="Tokens of the longest examples that are met; none: all.")
    curriculum: CurriculumConfig = Field(CurriculumConfig(), description="Whether easy records come first.")

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if (self.epochs is None) == (self.steps is None):
            raise ValueError("a stage has either epochs or steps")
        if self.mix is not None and self.curriculum.name != "none":
            raise ValueError("a stage has a mix or a curriculum, not both")
        return self


@dataclass(frozen=True)
class Place:
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
    config: StageConfig


def stages_of(config: "TrainConfig") -> list[StageConfig]:
    """The stages of a training; one with all its epochs where the config names none.

    Raises:
        UserError: there is a curriculum beside stages, which have their own, two go by different scores, or one by
            losses that the objective does not measure.
    """
    if config.stages and config.curriculum.name != "none":
        fix = "put it into the stages that it is for"
        raise UserError("a training in stages has no curriculum of its own", where="train.curriculum", fix=fix)
    stages = list(config.stages) or [StageConfig(epochs=config.epochs, curriculum=config.curriculum)]
    if len({stage.curriculum.difficulty for stage in stages if stage.curriculum.name != "none"}) > 1:
        raise UserError("the stages' curricula go by different difficulties", where="train.stages")
    if difficulty_of(stages) == "loss" and OBJECTIVES[config.objective].output in ("reward", "classes"):
        where, fix = "train.curriculum.difficulty", "name a column of the data with numbers"
        raise UserError(f"before {config.objective} there is no loss to go by", where=where, fix=fix)
    if any(stage.curriculum.name == "self_paced" for stage in stages) and config.has_teacher:
        what = f"{config.objective} measures no likelihood of single records, which self_paced goes by"
        raise UserError(what, where="train.curriculum.name", fix="use adaptive")
    return stages


def difficulty_of(stages: Sequence[StageConfig]) -> str | None:
    """What the curricula go by: ``loss`` or a column; None where no stage has one."""
    return next((stage.curriculum.difficulty for stage in stages if stage.curriculum.name != "none"), None)


class Order:
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
        stages: Sequence[StageConfig],
        *,
        kinds: Mapping[str, Sequence[str]] | None = None,
        lengths: np.ndarray | None = None,
        difficulties: np.ndarray | None = None,
    ) -> None:
        self.count, self.batch_size, self.seed = count, batch_size, seed
        self._stages: list[StageRows] = []
        self._starts = [0]
        self._observed = 0  # steps
        epoch = 0
        for number, config in enumerate(stages):
            where, rows = f"train.stages.{number}", np.arange(count)
            if config.max_length is not None:
                rows = np.flatnonzero(_known("lengths", lengths, count) <= config.max_length)
                if not len(rows):
                    raise UserError("all records are longer", where=f"{where}.max_length", fix="raise it")
            parts = [Part(rows, len(rows))]
            if config.mix is not None:
                of = _known(config.mix_by, (kinds or {}).get(config.mix_by), count)
                parts = parts_of(config, of, rows, f"{where}.mix", partial(_passes, config, batch_size))
            if left_out := count - sum(len(part.rows) for part in parts):
                log.info("  %s: %d of %d records are not met", where, left_out, count)
            ranks = None if config.curriculum.name == "none" else _known("difficulties", difficulties, count)
            stage = StageRows(config, parts, batch_size, seed, epoch, ranks)
            self._stages.append(stage)
            self._starts.append(self._starts[-1] + stage.steps)
            epoch += ceil(stage.steps / stage.passes.batches)

    @property
    def steps(self) -> int:
        """Optimiser steps of all stages."""
        return self._starts[-1]

    @property
    def stages(self) -> list[Place]:
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

    def place(self, step: int) -> Place:
        """Where a step stands.

        Raises:
            IndexError: the training has no such step.
        """
        number, stage, within = self._at(step)
        return Place(number, within, stage.steps, stage.first_epoch + within // stage.passes.batches, stage.config)

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
            there = (saved[at]["seen"], _looks(saved[at])) if at in saved else (0, 0)
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

    def _at(self, step: int) -> tuple[int, StageRows, int]:
        if not 0 <= step < self.steps:
            raise IndexError(f"the training has {self.steps} steps, and no step {step}")
        number = bisect_right(self._starts, step) - 1
        return number, self._stages[number], step - self._starts[number]


def _passes(config: StageConfig, batch_size: int, count: int) -> int:
    """How many passes of so many records a stage has, a part of one counted as one."""
    return config.epochs or ceil((config.steps or 1) / ceil(count / batch_size))


def _looks(state: Mapping[str, Any]) -> int:
    """How often a curriculum that goes by losses has looked at them."""
    return int(state["looks"]) if "looks" in state else len(state["shares"]) - 1


def _known(name: str, values: Sequence[Any] | np.ndarray | None, count: int) -> np.ndarray:
    """What is known of each record, or a ValueError."""
    found = np.asarray([] if values is None else values)
    if len(found) != count or (found.dtype.kind == "f" and np.isnan(found).any()):
        raise ValueError(f"the records' {name} are not known")
    return found
