"""Points of a study's space as settings of a training."""

import json
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from posttrain.store.errors import UserError
from posttrain.train.standalone import TrainJobConfig
from posttrain.tune.samplers.initial import find_drawn
from posttrain.tune.space import Settings, Space

SETTING_PREFIX = "train."
"""The beginning of a space's names that are keys of the config; others only help to derive values."""

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
    for key, value in settings.items():
        if key.startswith(SETTING_PREFIX):
            *path, last = setting_path(key)
            section = changed
            for name in path:
                if section.get(name) is None:  # a section that is off, such as train.lora.gates
                    section[name] = {}
                section = section[name]
            section[last] = value
    return changed


def configured_values(base: Mapping[str, Any], keys: Iterable[str]) -> dict[str, Any]:
    """Returns the values that a config has of keys of a space; without those of sections that are off.

    A pattern of LoRA's ranks that the config lacks has the rank of the rest: that changes no training.

    Args:
        base: a config as JSON values.
        keys: names of a space's entries; those that are no keys of a training are left out.
    """
    values: dict[str, Any] = {}
    for key in keys:
        if key.startswith(SETTING_PREFIX):
            section: Any = base
            for name in setting_path(key):
                section = section.get(name) if isinstance(section, Mapping) else None
            if section is None and key.startswith(RANKS_PREFIX):
                section = base["train"]["lora"]["rank"]
            if section is not None:
                values[key] = section
    return values


def find_point(space: Space, base: Mapping[str, Any], values: Settings, helpers: Settings) -> dict[str, Any] | None:
    """Returns the drawn values of settings; None where they are no point of the space.

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


def check_settings(space: Space, base: Mapping[str, Any]) -> None:
    """Checks points of a space as settings of a training.

    Args:
        space: what is searched.
        base: a `TrainJobConfig` as JSON values, which settings are laid over.

    Raises:
        UserError: the space has no key of the training, or settings that do not fit.
    """
    used = space.used_names
    for name in space.parameters:
        if not name.startswith(SETTING_PREFIX) and name not in used:
            what = f"`{name}` is no setting of a training, and no formula has it"
            raise UserError(what, where="tune.space", fix=f"write {SETTING_PREFIX}{name}")
    if not any(name.startswith(SETTING_PREFIX) for name in space.to_json()["entries"]):
        what = f"{', '.join(space.parameters)} change no setting of a training"
        raise UserError(what, where="tune.space", fix=f"derive one from them, such as {SETTING_PREFIX}learning_rate")
    generator = np.random.default_rng(0)
    for _ in range(CHECKED_POINTS):
        point = space.complete(space.draw(generator))
        try:
            TrainJobConfig.read(apply_settings(base, point), "tune.space")
        except UserError as error:
            named = {name: value for name, value in point.items() if error.key and error.key.startswith(name)}
            shown = "".join(f", as with {name} = {value}" for name, value in named.items())
            raise UserError(f"{error.what}{shown}", where="tune.space", fix=error.fix) from None
