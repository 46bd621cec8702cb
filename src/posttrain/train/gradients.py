"""The gradient of one optimiser step, added up over its micro-batches."""

import contextlib
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from posttrain.models.language_model import LanguageModel
from posttrain.models.packing import Packed
from posttrain.train.config import TrainConfig
from posttrain.train.data.loader import Batch
from posttrain.train.monitor.meter import phase
from posttrain.train.objectives.base import Objective
from posttrain.train.objectives.loss import Loss, mean_metrics, merge_metrics
from posttrain.train.regularization.adversarial import backward_adversarial


@dataclass(frozen=True)
class StepResult:
    """What a step's forward passes found.

    Args:
        loss: mean over all that the objective counts by.
        count: of that; 0 where there is nothing.
        supervised: supervised tokens.
        metrics: what else the objective measured, means.
        unit_losses: float32 [units of the step], nats a supervised token of each, in their order; None where the lesson
            does not read them.
    """

    loss: float
    count: float
    supervised: int
    metrics: dict[str, float]
    unit_losses: Tensor | None


def accumulate_gradients(
    lm: LanguageModel, lesson: Objective, config: TrainConfig, batch: Batch, scale: float = 1.0
) -> StepResult:
    """Add the gradient of a step's loss to the weights', one micro-batch after another.

    Each micro-batch's sum is divided by what the whole step counts, so that the gradient does not depend on how the
    step is cut.

    Args:
        scale: multiplies the gradient, not the loss that is returned.
    """
    with autocast(lm, config):
        count = lesson.begin(lm, batch.rows)
    whole = count or 1.0
    total, metrics, unit_losses = 0.0, [], []
    for rows, packed in zip(batch.rows, batch.packed, strict=True):
        once = partial(forward, lm, lesson, config, packed, rows)
        with phase("backward"):
            loss = backward_adversarial(once, whole / scale, lm, config.noise.adversarial)
        total += loss.sum.item()
        metrics.append(loss.metrics)
        if loss.unit_losses is not None:
            unit_losses.append(loss.unit_losses)
    supervised = sum(len(packed.targets) for packed in batch.packed)
    units = torch.cat(unit_losses) if unit_losses else None
    return StepResult(total / whole, count, supervised, mean_metrics(merge_metrics(metrics)), units)


def forward(lm: LanguageModel, lesson: Objective, config: TrainConfig, packed: Packed, rows: list[int]) -> Loss:
    """The loss of one micro-batch, in the config's precision."""
    with phase("head"), autocast(lm, config):
        return lesson.loss(lm, packed, rows)


def autocast(lm: LanguageModel, config: TrainConfig) -> contextlib.AbstractContextManager[object]:
    """What the model computes in, under precision ``autocast``."""
    if config.precision == "autocast":
        return torch.autocast(lm.device.type, torch.bfloat16)
    return contextlib.nullcontext()
