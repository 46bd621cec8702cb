"""Checks of a search that read the model or the records, before anything is trained."""

import itertools
import json
import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from posttrain.evaluate.scorers.base import read_examples
from posttrain.evaluate.scorers.likelihood import label_indices, preference_pairs
from posttrain.models.shape import read_config
from posttrain.store.errors import UserError
from posttrain.train.config import TrainConfig
from posttrain.train.lora import check_ranks
from posttrain.train.shape import trained_config
from posttrain.train.standalone import TrainJobConfig
from posttrain.tune.space import Settings, Space
from posttrain.tune.trainings.config import SHAPE_KEYS
from posttrain.tune.trainings.measured_trial import MeasuredTrial
from posttrain.tune.trainings.settings import CHECKED_POINTS, RANKS_PREFIX, apply_settings

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


def check_rank_patterns(space: Space, base: Mapping[str, Any], source: str) -> None:
    """Checks the patterns of ``train.lora.ranks`` of a space and its config, once for each set of patterns.

    Args:
        space: what is searched.
        base: a `TrainJobConfig` as JSON values, which settings are laid over.
        source: the model, as `posttrain.models.sources.locate` returns it.

    Raises:
        UserError: a pattern matches no module of the model.
    """
    searched = any(name.startswith(RANKS_PREFIX) for name in space.to_json()["entries"])
    lora = base["train"]["lora"]
    if not (searched or lora["ranks"] or lora["gates"]):
        return
    generator = np.random.default_rng(0)
    trainings: dict[str, TrainConfig] = {}
    for _ in range(CHECKED_POINTS):
        values = apply_settings(base, space.complete(space.draw(generator)))
        train = TrainJobConfig.read(values, "tune.space").train
        key = json.dumps([train.method, train.lora.targets, list(train.lora.ranks)])
        # With the greatest ranks, as 0 everywhere is not a mistake in a pattern.
        before = trainings.get(key, train).lora.ranks
        ranks = {pattern: max(rank, before[pattern]) for pattern, rank in train.lora.ranks.items()}
        trainings[key] = train.model_copy(update={"lora": train.lora.model_copy(update={"ranks": ranks})})
    for train in trainings.values():
        check_ranks(source, train)


def check_answers(trial: MeasuredTrial) -> None:
    """Raises a UserError if held-out records lack what the scorer needs, as it would after the first training."""
    examples = read_examples(trial.held_out, "tune.held_out")
    if trial.suite.scorer == "label_likelihood":
        label_indices(examples, trial.base["task"]["labels"] or [], "tune.held_out")
    elif trial.suite.scorer == "preference":
        examples.check_prompts("tune.held_out")
        preference_pairs(examples, "tune.held_out")
