"""Checks the ranks that a space gives LoRA's modules, by the names of the model's modules."""

import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from posttrain.train.config import TrainConfig
from posttrain.train.lora import check_ranks
from posttrain.train.standalone import TrainJobConfig
from posttrain.tune.space import Space
from posttrain.tune.trainings.settings import CHECKED_POINTS, RANKS_PREFIX, apply_settings


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
        # With the greatest ranks, as 0 everywhere is no mistake in a pattern.
        before = trainings.get(key, train).lora.ranks
        ranks = {pattern: max(rank, before[pattern]) for pattern, rank in train.lora.ranks.items()}
        trainings[key] = train.model_copy(update={"lora": train.lora.model_copy(update={"ranks": ranks})})
    for train in trainings.values():
        check_ranks(source, train)
