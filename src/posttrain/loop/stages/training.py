"""Train: a candidate from the base or the champion and the training set."""

from pathlib import Path
from typing import Any

from posttrain.loop.turn import Turn, task_key
from posttrain.store.artifacts import Artifact
from posttrain.train.stage import VERSION, train


def train_candidate(turn: Turn, base: str, champion: str, dataset: str) -> Artifact:
    """The round's candidate."""
    source = base if turn.config.train.start == "base" else champion

    def work(out: Path, scratch: Path) -> dict[str, Any]:
        records = turn.dataset(dataset).records
        return train(
            turn.path(source),
            records,
            turn.config.train,
            turn.config.task,
            seed=turn.seed("train"),
            out=out,
            scratch=scratch,
        )

    settings = turn.config.train.model_dump(mode="json", exclude={"start", "checkpoint", "sinks"})
    inputs = {"source": source, "dataset": dataset}
    return turn.stage("train", "model", inputs, {"train": settings, **task_key(turn.config)}, work, version=VERSION)
