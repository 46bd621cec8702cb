"""Learning-rate schedules and their config section."""

import math
from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from posttrain.store.errors import UserError
from posttrain.store.section import Section
from posttrain.train.data.batch_sampler import BatchSampler


class ScheduleConfig(Section):
    """The learning-rate schedule of a training."""

    name: Literal["constant", "linear", "cosine", "wsd"] = Field(
        "cosine", description="Learning rate after the warm-up; wsd is warm-up, stable, decay."
    )
    warmup: float = Field(
        0.1, ge=0, description="Share of the steps in which the rate climbs; from 1 on the number of these steps."
    )
    final_rate: float = Field(
        0.0, ge=0, le=1, description="Lowest rate after the warm-up, as a share of the peak; constant stays above it."
    )
    decay: float = Field(0.2, gt=0, le=1, description="Share of the steps, at the end, in which wsd's rate falls.")

    @field_validator("warmup")
    @classmethod
    def _is_share_or_count(cls, warmup: float) -> float:
        if warmup >= 1 and warmup % 1:
            raise ValueError(f"{warmup:g} is not a share below 1 nor a whole number of steps")
        return warmup

    @model_validator(mode="after")
    def _phases_fit(self) -> Self:
        if self.name == "wsd" and self.warmup < 1 < self.warmup + self.decay:
            raise ValueError("warmup and decay together exceed the whole training (1.0)")
        return self

    def warmup_length(self, steps: int) -> int:
        """Returns the number of warm-up steps of a training of ``steps``."""
        return math.ceil(self.warmup * steps) if self.warmup < 1 else int(self.warmup)

    def check(self, steps: int) -> None:
        """Raises a UserError if the schedule does not fit into a training of ``steps`` optimiser steps."""
        warmup = self.warmup_length(steps)
        if warmup > steps:
            raise UserError(
                f"{warmup} warm-up steps are more than the {steps} of the training",
                where="train.schedule.warmup",
                fix="shorten the warm-up or train longer",
            )
        if self.name == "wsd" and self.warmup >= 1 and warmup + math.ceil(self.decay * steps) > steps:
            raise UserError(
                f"warm-up ({warmup} steps) and decay ({math.ceil(self.decay * steps)}) exceed the {steps} steps of the "
                "training",
                where="train.schedule.decay",
                fix="shorten one of them or train longer",
            )


def scheduled_lr(config: ScheduleConfig, learning_rate: float, step: int, steps: int) -> float:
    """Returns the learning rate of optimiser step ``step`` (from 0) of ``steps``.

    The warm-up climbs in equal steps, the first already above zero, to the peak at its last step; the schedule starts
    with the step after it. Never negative, never above ``learning_rate``.

    Args:
        config: the schedule; ``ScheduleConfig.check`` says beforehand whether it fits.
        learning_rate: the peak.
        step: the step, from 0; ``steps`` itself gives where the schedule ends.
        steps: optimiser steps of the whole training.
    """
    warmup = config.warmup_length(steps)
    # (step + 1): a first step at rate 0 would be wasted.
    if step < warmup:
        return learning_rate * ((step + 1) / warmup)
    if config.name == "constant":
        return learning_rate
    total = max(1, steps - warmup)
    remaining = _remaining(config, min(step - warmup, total), total, warmup)
    return learning_rate * (config.final_rate + (1 - config.final_rate) * remaining)


def phase_lr(config: ScheduleConfig, learning_rate: float, sampler: BatchSampler, step: int) -> float:
    """Returns the learning rate of a step of the training, as its phase schedules it.

    Args:
        config: the schedule of every phase.
        learning_rate: the peak of phases without one of their own.
        sampler: finds the step's phase.
        step: the step of the training, from 0.
    """
    at = sampler.position(step)
    return scheduled_lr(config, at.config.learning_rate or learning_rate, at.step, at.steps)


def _remaining(config: ScheduleConfig, done: int, total: int, warmup: int) -> float:
    """Returns the share of the peak above the final rate, ``done`` of ``total`` steps after the warm-up.

    ``linear`` is that of Devlin et al. 2018, arXiv:1810.04805; ``cosine`` one cycle of Loshchilov & Hutter 2016,
    arXiv:1608.03983; ``wsd`` that of Hu et al. 2024, arXiv:2404.06395, which falls by the square root as in Hägele et
    al. 2024, arXiv:2405.18392.
    """
    if config.name == "linear":
        return 1 - done / total
    if config.name == "cosine":
        return (1 + math.cos(math.pi * done / total)) / 2
    # A share of the whole training, as the warm-up is, and not of what follows it.
    falling = min(math.ceil(config.decay * (warmup + total)), total)
    return 1 - math.sqrt(max(0, done - (total - falling)) / falling)
