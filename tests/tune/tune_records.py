"""Records, a training and a search over it, shared by the tests of tuned trainings."""

from pathlib import Path
from typing import Any

import pyarrow as pa

from posttrain.testing.steps import table_of
from posttrain.train.standalone import TrainJobConfig
from posttrain.tune.trainings.config import TuneConfig

RATES = {"train.learning_rate": {"float": [1e-4, 1e-2], "log": True}}

TRAIN = {"epochs": 3, "batch_size": 4, "precision": "float32"}


def rows(start: int, count: int) -> pa.Table:
    return table_of(
        *(
            {"prompt": f"message {n} about {'cards' if n % 2 else 'cash'}", "completion": "card" if n % 2 else "cash"}
            for n in range(start, start + count)
        )
    )


RECORDS, HELD_OUT = rows(0, 24), rows(100, 10)


def job(tiny_model: Path, **train: Any) -> TrainJobConfig:
    values = {"model": str(tiny_model), "data": "memory", "task": {"labels": ["card", "cash"]}}
    return TrainJobConfig.read({**values, "train": {**TRAIN, **train}}, "config")


def tune_config(**changes: Any) -> TuneConfig:
    space = {"train.learning_rate": {"float": [1e-4, 1e-2], "log": True}, "train.batch_size": [4, 8]}
    return TuneConfig.read({"space": space, "held_out": "held.jsonl", "sampler": "random", **changes}, "tune")
