"""Learning-rate schedules and their config section."""

import math
from collections.abc import Callable
from typing import Literal, Self

from pydantic import Field, model_validator

from posttrain.store.errors import UserError
from posttrain.store.section import Section

_CYCLICAL = ("triangular", "triangular2", "exp_range")


class ScheduleConfig(Section):
    """The learning-rate schedule of a training."""

    name: Literal[
        "constant",
        "linear",
        "cosine",
        "cosine_restarts",
        "wsd",
        "inverse_sqrt",
        "triangular",
        "triangular2",
        "exp_range",
    ] = Field("cosine", description="Learning rate after the warm-up; wsd is warm-up, stable, decay.")
    warmup: float = Field(
        0.1, ge=0, lt=1, description="Share of the steps in which the rate climbs; cyclical schedules need none."
    )
    warmup_steps: int | None = Field(None, ge=0, description="Steps in which the rate climbs, in place of a share.")
    final_rate: float = Field(
        0.0, ge=0, le=1, description="Lowest rate after the warm-up, as a share of the peak; constant stays above it."
    )
    cycles: int = Field(4, ge=1, description="Rounds of cosine_restarts and of the cyclical schedules.")
    decay: float = Field(0.2, gt=0, le=1, description="Share of the steps, at the end, in which wsd's rate falls.")
    decay_shape: Literal["linear", "sqrt"] = Field("sqrt", description="Shape of wsd's decay: 1 - x, or 1 - sqrt(x).")
    gamma: float = Field(0.999, gt=0, le=1, description="Factor by which a step shrinks exp_range's cycles.")

    @model_validator(mode="after")
    def _phases_fit(self) -> Self:
        if self.name == "wsd" and self.warmup_steps is None and self.warmup + self.decay > 1:
            raise ValueError("warmup and decay together exceed the whole training (1.0)")
        return self

    def warmup_length(self, steps: int) -> int:
        """Returns the number of warm-up steps of a training of ``steps``."""
        if self.name in _CYCLICAL:
            return 0
        return math.ceil(self.warmup * steps) if self.warmup_steps is None else self.warmup_steps

    def check(self, steps: int, where: str = "train.schedule") -> None:
        """Raises a UserError if the schedule does not fit into a training of ``steps`` optimiser steps.

        Args:
            steps: optimiser steps of the whole training.
            where: key that the error names.
        """
        warmup = self.warmup_length(steps)
        if warmup > steps:
            raise UserError(
                f"{warmup} warm-up steps are more than the {steps} of the training",
                where=f"{where}.warmup_steps",
                fix="shorten the warm-up or train longer",
            )
        if self.name == "wsd" and self.warmup_steps is not None and warmup + math.ceil(self.decay * steps) > steps:
            raise UserError(
                f"warm-up ({warmup} steps) and decay ({math.ceil(self.decay * steps)}) exceed the {steps} steps of the "
                "training",
                where=f"{where}.decay",
                fix="shorten one of them or train longer",
            )
        if self.name in ("cosine_restarts", *_CYCLICAL) and self.cycles > steps - warmup:
            raise UserError(
                f"{self.cycles} cycles do not fit into the {steps - warmup} steps after the warm-up",
                where=f"{where}.cycles",
                fix="take fewer cycles or train longer",
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
    total = max(1, steps - warmup)
    return learning_rate * _SHAPES[config.name](config, min(step - warmup, total), total, warmup)


# Each gives the share of the peak, ``done`` steps after a warm-up of ``warmup`` steps with ``total`` steps to go then.


def _constant(config: ScheduleConfig, done: int, total: int, warmup: int) -> float:
    return 1.0


def _linear(config: ScheduleConfig, done: int, total: int, warmup: int) -> float:
    """Slanted down to the end, as in Devlin et al. 2018, arXiv:1810.04805."""
    return _scale_above_final(config, 1 - done / total)


def _cosine(config: ScheduleConfig, done: int, total: int, warmup: int) -> float:
    """Half a cosine (Loshchilov & Hutter 2016, arXiv:1608.03983, one cycle)."""
    return _scale_above_final(config, (1 + math.cos(math.pi * done / total)) / 2)


def _cosine_restarts(config: ScheduleConfig, done: int, total: int, warmup: int) -> float:
    """SGDR (Loshchilov & Hutter 2016, arXiv:1608.03983) with cycles of equal length, the last down to the end."""
    if done == total:
        return config.final_rate
    return _cosine(config, done * config.cycles % total, total, warmup)


def _wsd(config: ScheduleConfig, done: int, total: int, warmup: int) -> float:
    """Warm-up, stable, decay (Hu et al. 2024, arXiv:2404.06395), falling as in Hägele et al. 2024, arXiv:2405.18392."""
    # A share of the whole training, as the warm-up is, and not of what follows it.
    falling = min(math.ceil(config.decay * (warmup + total)), total)
    into = max(0, done - (total - falling)) / falling
    return _scale_above_final(config, 1 - (into if config.decay_shape == "linear" else math.sqrt(into)))


def _inverse_sqrt(config: ScheduleConfig, done: int, total: int, warmup: int) -> float:
    """The square root of warm-up over step (Vaswani et al. 2017, arXiv:1706.03762); no warm-up counts as one step."""
    return max(config.final_rate, math.sqrt(max(1, warmup) / (max(1, warmup) + done)))


def _triangular(config: ScheduleConfig, done: int, total: int, warmup: int) -> float:
    """Up and down in straight lines, ``2 * stepsize = total / cycles`` (Smith 2015, arXiv:1506.01186)."""
    return _scale_above_final(config, _cycle(config, done, total)[1])


def _triangular2(config: ScheduleConfig, done: int, total: int, warmup: int) -> float:
    """Triangles of half the height in each cycle (Smith 2015, arXiv:1506.01186)."""
    cycle, height = _cycle(config, done, total)
    return _scale_above_final(config, height * 0.5 ** (cycle - 1))


def _exp_range(config: ScheduleConfig, done: int, total: int, warmup: int) -> float:
    """Triangles whose height shrinks by gamma in each step (Smith 2015, arXiv:1506.01186)."""
    return _scale_above_final(config, _cycle(config, done, total)[1] * config.gamma**done)


def _cycle(config: ScheduleConfig, done: int, total: int) -> tuple[int, float]:
    """Returns Smith's ``cycle`` (from 1) and ``max(0, 1 - x)``."""
    # In whole numbers as far as possible: a rounded cycle would start a step early or late.
    cycle, rest = divmod(done * config.cycles, total)
    return cycle + 1, 1 - abs(2 * rest / total - 1)


def _scale_above_final(config: ScheduleConfig, remaining: float) -> float:
    return config.final_rate + (1 - config.final_rate) * remaining


_SHAPES: dict[str, Callable[[ScheduleConfig, int, int, int], float]] = {
    "constant": _constant,
    "linear": _linear,
    "cosine": _cosine,
    "cosine_restarts": _cosine_restarts,
    "wsd": _wsd,
    "inverse_sqrt": _inverse_sqrt,
    "triangular": _triangular,
    "triangular2": _triangular2,
    "exp_range": _exp_range,
}
