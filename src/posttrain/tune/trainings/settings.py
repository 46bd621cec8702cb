"""Points of a study's space as settings of a training."""

import json
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any

import numpy as np

from posttrain.store.errors import UserError
from posttrain.train.config import TrainConfig, training_phases
from posttrain.tune.parameters import Choice, Float, Int
from posttrain.tune.samplers.initial import find_drawn
from posttrain.tune.space import Settings, Space

_WARMUP = "train.schedule.warmup"

SETTING_PREFIX = "train."
"""The beginning of a space's names that are keys of the config; others only help to derive values."""

OBJECTIVE_KEY = "train.objective"
"""The key whose values are names of objectives; other keys below it are an objective's settings."""

RANKS_PREFIX = "train.lora.ranks."
"""The beginning of a space's names that end in a regular expression for modules, dots and all."""

CHECKED_POINTS = 50
"""Points of a space whose settings are tried before anything is trained."""


def setting_path(key: str) -> list[str]:
    """Returns the keys that lead to a setting; a pattern of ranks is one, dots and all."""
    if key.startswith(RANKS_PREFIX):
        return [*RANKS_PREFIX.rstrip(".").split("."), key.removeprefix(RANKS_PREFIX)]
    return key.split(".")


def apply_settings(values: Mapping[str, Any], settings: Settings) -> dict[str, Any]:
    """Returns a config with settings laid over it; those whose names do not begin with ``train.`` only help others."""
    changed: dict[str, Any] = json.loads(json.dumps(values))
    # The objective before its settings.
    for key, value in sorted(settings.items(), key=lambda setting: setting[0] != OBJECTIVE_KEY):
        if key.startswith(SETTING_PREFIX):
            *path, last = setting_path(key)
            section = changed
            for name in path:
                if section.get(name) is None:  # a section that is off, such as train.lora.gates
                    section[name] = {}
                section = section[name]
            section[last] = {"name": value} if key == OBJECTIVE_KEY else value
    return changed


def configured_values(base: Mapping[str, Any], keys: Iterable[str]) -> dict[str, Any]:
    """Returns the values that a config has of keys of a space; without those of sections that are off.

    A pattern of LoRA's ranks that the config lacks has the rank of the rest: that changes no training.

    Args:
        base: a config as JSON values.
        keys: names of a space's entries; those that are not keys of a training are left out.
    """
    values: dict[str, Any] = {}
    for key in keys:
        if key.startswith(SETTING_PREFIX):
            section: Any = base
            for name in setting_path(key):
                section = section.get(name) if isinstance(section, Mapping) else None
            if section is None and key.startswith(RANKS_PREFIX):
                section = base["train"]["lora"]["rank"]
            if key == OBJECTIVE_KEY and isinstance(section, Mapping):
                section = section["name"]
            if section is not None:
                values[key] = section
    return values


def find_point(space: Space, base: Mapping[str, Any], values: Settings, helpers: Settings) -> dict[str, Any] | None:
    """Returns the drawn values of settings; None where they are not a point of the space.

    Args:
        space: what is searched.
        base: a config as JSON values, which settings are laid over.
        values: the settings, by key of the config.
        helpers: values of the space's other names.
    """
    known: dict[str, Any] = {**helpers, **values}
    drawn: dict[str, Any] = {}
    for name, parameter in space.parameters.items():
        if name in known and space.exists(name, drawn):
            if known[name] not in parameter:  # before formulas see it
                return None
            drawn[name] = known[name]
    point = find_drawn(drawn, space)
    if point is None:
        return None
    # A value that the space derives or fixes may differ from that of the config.
    return point if apply_settings(base, space.complete(point)) == apply_settings(base, values) else None


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
