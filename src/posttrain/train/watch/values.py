"""What a training step measured."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Self

# Fields that hold several numbers, and what stands before these in tools that plot.
_BY_NAME = {"group_norms": "grad_norm", "metrics": "objective", "phases": "seconds"}


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What is known once the gradient is there and the optimiser has not stepped yet.

    Attributes:
        step: optimiser step, from 0.
        loss: nats a supervised token, or what the objective counts by; mean over the step.
        grad_norm: L2 norm over all gradients, before clipping.
        supervised_tokens: tokens of this step that the loss is taken on.
    """

    step: int
    loss: float
    grad_norm: float
    supervised_tokens: int


@dataclass(frozen=True, kw_only=True)
class StepValues(Measured):
    """All that a step measured.

    Attributes:
        epoch: passes over the data that were finished before, from 0.
        loss_count: what ``loss`` is a mean over: supervised tokens, pairs, answers, texts or their weights.
        lr: learning rate of the step, before a group's own scale.
        tokens: tokens of this step without padding.
        seconds: wall time of the step, waiting for data included.
        tokens_per_second: ``tokens`` over ``seconds``.
        memory_bytes: most memory in use so far, of the accelerator where there is one, else of the process.
        group_norms: gradient norm by layer group.
        update_ratio: norm of the update over norm of the weights.
        loss_scale: what the loss was multiplied by (float16 only).
        data_wait: share of ``seconds`` spent waiting for data, 0 to 1.
        mfu: share of the measured matrix-product peak that the model's own work used, 0 to 1.
        metrics: what the objective measured besides, by its name, such as ``rewards/margins``; means over the step.
        phases: seconds by phase (see `phases`); with an accelerator those of its host.
    """

    epoch: int
    loss_count: float
    lr: float
    tokens: int
    seconds: float
    tokens_per_second: float
    memory_bytes: int
    group_norms: dict[str, float] = field(default_factory=dict)
    update_ratio: float | None = None
    loss_scale: float | None = None
    data_wait: float = 0.0
    mfu: float | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    phases: dict[str, float] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Every value by its name; a number that is not finite becomes None, as JSON has no word for it."""
        found = {item.name: getattr(self, item.name) for item in fields(self)}
        return {
            name: {key: finite(one) for key, one in value.items()} if name in _BY_NAME else finite(value)
            for name, value in found.items()
        }

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """The reverse of `to_json`, but for infinities, which come back as NaN.

        Lines of before there was ``loss_count`` have the supervised tokens instead.
        """
        lost = {name: math.nan for name in ("loss", "grad_norm") if values[name] is None}
        several = {
            name: {key: math.nan if one is None else one for key, one in values[name].items()}
            for name in _BY_NAME
            if name in values
        }
        return cls(**{"loss_count": values["supervised_tokens"], **values, **lost, **several})

    def numbers(self) -> dict[str, float]:
        """The finite numbers by name, without ``step``: for tools that plot.

        Group norms are ``grad_norm/GROUP``, the objective's metrics ``objective/NAME``, phases ``seconds/PHASE``.
        """
        values = self.to_json()
        for name, prefix in _BY_NAME.items():
            values |= {f"{prefix}/{key}": one for key, one in values.pop(name).items()}
        del values["step"]
        return {name: float(value) for name, value in values.items() if value is not None}


def mean_loss(steps: Iterable[StepValues]) -> float | None:
    """Mean loss over all that the steps counted; None where that is nothing. Losses that are no number are left out."""
    known = [step for step in steps if math.isfinite(step.loss)]
    count = sum(step.loss_count for step in known)
    return sum(step.loss * step.loss_count for step in known) / count if count else None


def finite(value: float | None) -> float | None:
    """``value``, or None where it is no finite number."""
    return value if value is not None and math.isfinite(value) else None
