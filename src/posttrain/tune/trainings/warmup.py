"""The warm-up of a study's trainings, in which no training may be given up."""

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import numpy as np

from posttrain.store.errors import UserError
from posttrain.train.config import TrainConfig, training_phases
from posttrain.tune.parameters import Choice, Float, Int
from posttrain.tune.space import Settings, Space
from posttrain.tune.trainings.settings import CHECKED_POINTS, apply_settings

_WARMUP = "train.schedule.warmup"


def warmup_share(space: Space, base: Mapping[str, Any], records: int) -> float:
    """Returns the greatest share of a training that is warm-up, in the config and at points of its space.

    Steps follow from the number of records; records that are left out, and mixes, may change it a little. Of a training
    in phases the warm-up of the first one counts.

    Args:
        space: what is searched.
        base: a config as JSON values, which settings are laid over.
        records: number of records to train on.
    """
    # A draw hardly ever has the end of a range.
    greatest = {_WARMUP: _greatest(space.parameters[_WARMUP])} if _WARMUP in space.parameters else {}
    generator = np.random.default_rng(0)
    points: list[Settings] = [{}]
    for _ in range(CHECKED_POINTS):
        drawn = space.complete(space.draw(generator))
        points += [drawn, {**drawn, **{name: value for name, value in greatest.items() if name in drawn}}]
    shares = [0.0]
    for point in points:
        with suppress(UserError):  # such as the longest warm-up beside the longest decay, which no trial has
            train = TrainConfig.read(apply_settings(base, point)["train"], "tune.space")
            shares.append(_share(train, records))
    return max(shares)


def _share(train: TrainConfig, records: int) -> float:
    batches = -(-records // train.batch_size)
    steps = [phase.steps or (phase.epochs or 1) * batches for phase in training_phases(train)]
    return min(1.0, train.schedule.warmup_length(steps[0]) / sum(steps))


def _greatest(parameter: Any) -> Any:
    if isinstance(parameter, Float | Int):
        return parameter.high
    assert isinstance(parameter, Choice), "the kinds of parameters are these"
    return max((value for value in parameter.values if value is not None), default=None)
