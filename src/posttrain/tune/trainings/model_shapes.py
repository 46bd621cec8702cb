"""Checks the shapes of the models that a study is to train, before anything is trained."""

import itertools
import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from posttrain.models.shape import read_config
from posttrain.store.errors import UserError
from posttrain.train.config import TrainConfig
from posttrain.train.shape import trained_config
from posttrain.tune.space import Settings, Space
from posttrain.tune.trainings.config import SHAPE_KEYS
from posttrain.tune.trainings.settings import apply_settings

_GRID = 64  # values of one key that are checked, the ends of its range among them

_POINTS = 512  # of the space that are checked, if the keys have more combinations


def check_shapes(space: Space, base: Mapping[str, Any], source: str) -> None:
    """Checks the shapes of the models that a space asks for against the config of the model to start from.

    Args:
        space: what is searched.
        base: a `TrainJobConfig` as JSON values, which settings are laid over.
        source: the model, as ``posttrain.models.sources.locate`` names it.

    Raises:
        UserError: a value, or several together, give no model.
    """
    keys = [name for name in space.varying if name.startswith(SHAPE_KEYS)]
    if not keys and not TrainConfig.read(base["train"], "train").changes_shape:
        return
    config, seen = read_config(source), set[str]()
    for point in _points(space, keys):
        named = {name: point[name] for name in keys if name in point}
        if repr(named) in seen:
            continue
        seen.add(repr(named))
        try:
            trained_config(config, TrainConfig.read(apply_settings(base, point)["train"], "tune.space"))
        except UserError as error:
            if not named:
                raise
            shown = ", ".join(f"{name} = {value}" for name, value in named.items())
            raise UserError(f"{error.what}, as with {shown}", where="tune.space", fix=error.fix) from None


def _points(space: Space, keys: list[str]) -> Iterator[Settings]:
    """Yields points with all combinations of the keys' values; of too many with each value of each key."""
    generator = np.random.default_rng(0)
    grids = {name: space.parameters[name].grid(_GRID) for name in keys if name in space.parameters}
    combinations: Iterator[dict[str, Any]]
    if math.prod(map(len, grids.values())) <= _POINTS:
        combinations = (dict(zip(grids, values, strict=True)) for values in itertools.product(*grids.values()))
    else:
        combinations = ({name: value} for name, values in grids.items() for value in values)
    # Drawn ones too, for values that are derived from others.
    for changes in itertools.chain(combinations, itertools.repeat({}, _POINTS)):
        point = space.complete(space.draw(generator) | changes)
        if space.is_feasible(point):
            yield point
