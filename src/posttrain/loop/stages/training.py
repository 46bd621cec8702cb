"""Train: a candidate from the base or the champion and the training set."""

from pathlib import Path
from typing import Any

from posttrain.data.split.training_records import require_apart
from posttrain.loop.stages.difficulty import difficulties
from posttrain.loop.stages.fetch import fetch_teacher
from posttrain.loop.suites import measured_on
from posttrain.loop.turn import Turn, task_key
from posttrain.store.artifacts import Artifact
from posttrain.train.config import BESIDE
from posttrain.train.stage import VERSION, train
from posttrain.train.watch.sinks.together import open_sinks


def train_candidate(turn: Turn, base: str, champion: str, dataset: str, test: Artifact) -> Artifact:
    """The round's candidate.

    Raises:
        UserError: the training set gives away what is in the test set or another suite.
    """
    source = base if turn.config.train.start == "base" else champion
    teacher = fetch_teacher(turn)
    records = turn.dataset(dataset).records
    # Not in the work: what is measured on may have changed since a model was trained on these records.
    measured = measured_on(turn.config, turn.dataset(test.id).records, turn.workspace.root)
    require_apart(records, measured, f"the training set of round {turn.number}", turn.config.data.decontamination)

    config, hard, scored = difficulties(turn, records)

    def work(out: Path, scratch: Path) -> dict[str, Any]:
        # A run of its own at each tracker, whose name stays when a killed round goes on.
        run = f"{turn.workspace.root.resolve().name}-round-{turn.number}-{scratch.name[:8]}"
        # Beside the artifact, which is the same whenever it is made: speed and memory are not. The report reads it.
        metrics = turn.workspace.home / "metrics" / f"{scratch.name}.jsonl"
        sinks = open_sinks(turn.config.train.sinks, metrics, run=run)
        try:
            return train(
                turn.path(source),
                records,
                config if teacher is None else config.with_teacher(turn.path(teacher.id)),
                turn.config.task,
                seed=turn.seed("train"),
                out=out,
                scratch=scratch,
                sink=sinks,
                difficulties=hard,
            )
        finally:
            sinks.close()

    # A teacher is an input: which one it is counts, and not where it lies.
    settings = turn.config.train.with_teacher(None).model_dump(mode="json", exclude={"start", *BESIDE})
    inputs = {"source": source, "dataset": dataset} | ({"teacher": teacher.id} if teacher else {}) | scored
    return turn.stage("train", "model", inputs, {"train": settings, **task_key(turn.config)}, work, version=VERSION)
