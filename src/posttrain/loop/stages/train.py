"""Train: trains a candidate on the training set, from the base model or the champion."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import pyarrow as pa

from posttrain.data.versions.leaks import require_no_overlap
from posttrain.evaluate.held_out import held_out_score
from posttrain.evaluate.metrics import recall_weights
from posttrain.evaluate.suite import read_evaluation
from posttrain.loop.context import RoundContext, task_key
from posttrain.loop.difficulty import difficulties
from posttrain.loop.history import finished_states
from posttrain.loop.model_registry import champion_before_round
from posttrain.loop.record import LoopRecord
from posttrain.loop.stage import Stage
from posttrain.loop.stages.evaluate import Evaluate
from posttrain.loop.stages.fetch import fetch_teacher
from posttrain.loop.stages.negatives import HardNegativePairs
from posttrain.loop.stages.pseudo import PseudoLabel, pseudo_weights
from posttrain.loop.state import RoundState
from posttrain.loop.suites import measured_on
from posttrain.report.section import Section
from posttrain.store.artifacts import Artifact
from posttrain.store.message import Message
from posttrain.train.config import TrainConfig
from posttrain.train.curves import read_round_training
from posttrain.train.monitor.sinks import open_sinks
from posttrain.train.report import trainings_section


@dataclass(frozen=True)
class Train(Stage):
    """Trains one candidate.

    Args:
        source: Id of the model to start from.
        dataset: Id of the training set.
        records: RECORD table of the training set.
        config: The train section; without a curriculum where no record has a score.
        difficulties: float64 [records], a higher one is harder; None where no curriculum follows a score.
        score_inputs: Artifacts that the difficulties were read from, by role.
        teacher: The model to learn from, where the objective has one.
        weights: float64 [records], of pseudo-labels and of errors that evaluation steers; None where all are 1.
        steering: Id of the evaluation that the weights follow; None where there is none.
    """

    source: str
    dataset: str
    records: pa.Table
    config: TrainConfig
    difficulties: np.ndarray | None
    score_inputs: dict[str, str]
    teacher: Artifact | None
    weights: np.ndarray | None = None
    steering: str | None = None
    name = "train"
    title = Message("train")
    kind = "model"
    version = 5

    @classmethod
    def execute(cls, context: RoundContext) -> RoundState:
        """Trains the candidate.

        Raises:
            UserError: the training set holds records of the test set or of another suite.
        """
        stage = cls.prepare(context)
        champion = champion_before_round(context.workspace, context.number)
        return context.update(champion=champion, candidate=context.run(stage).id)

    @classmethod
    def prepare(cls, context: RoundContext) -> Self:
        """Returns the stage with all that the training reads, as the context's config has it.

        Raises:
            UserError: the training set holds records of the test set or of another suite.
        """
        # Not the champion of the round's start: labelling may take days, and the user may promote or roll back by hand.
        champion = champion_before_round(context.workspace, context.number)
        source = context.state.id("base") if context.config.train.start == "base" else champion
        dataset, test = training_dataset(context), context.state.id("test")
        teacher = fetch_teacher(context)
        records = context.dataset(dataset).records
        weights = pseudo_weights(records)
        # Not in `run`, which a finished training skips: the suites may have changed since then.
        measured = measured_on(context.config, context.dataset(test).records, context.workspace.root)
        name = f"the training set of round {context.number}"
        require_no_overlap(records, measured, name, context.config.data.steps)
        config, difficulty, score_inputs = difficulties(context, records)
        steering = _steering_evaluation(context, champion, test)
        if steering is not None:
            weights = _error_weights(context, records, steering) * (1.0 if weights is None else weights)
        return cls(source, dataset, records, config, difficulty, score_inputs, teacher, weights, steering)

    @classmethod
    def sections(cls, loop: LoopRecord) -> Iterator[Section]:
        """Yields the curves of each round's training."""
        runs = {run.output: run for run in loop.workspace.metadata.runs(stage=cls.name, status="done")}
        trainings = {
            record.number: read_round_training(loop.workspace, run, Message("round {number}", number=record.number))
            for record in loop.done
            if (run := runs.get(record.state.candidate)) is not None
        }
        yield trainings_section(trainings, loop.detail)

    def inputs(self, context: RoundContext) -> dict[str, str]:
        """Returns the model to start from, the training set, the teacher and the scores."""
        teacher = {"teacher": self.teacher.id} if self.teacher else {}
        steering = {"steering": self.steering} if self.steering else {}
        return {"source": self.source, "dataset": self.dataset} | teacher | steering | self.score_inputs

    def settings(self, context: RoundContext) -> dict[str, Any]:
        """Returns the train section without keys that change no weight."""
        steering = {"error_weight": context.config.evaluate.error_weight} if self.steering else {}
        return {"train": context.train_config.key_settings(), **steering, **task_key(context.config)}

    def run(self, context: RoundContext, out: Path, scratch: Path) -> dict[str, Any]:
        """Trains; a killed training resumes from the checkpoints in ``scratch``."""
        # Here, as `status` lists the stages without torch.
        from posttrain.train.evaluation import HeldOut
        from posttrain.train.stage import train

        evaluate = self.config.evaluate
        score = held_out_score(evaluate.metrics, context.config.task)
        # The key is in the name, so that a tracker shows a resumed round as the same run.
        run = f"{context.workspace.root.resolve().name}-round-{context.number}-{scratch.name[:8]}"
        # Not in the artifact, which must be the same bytes whenever it is built: speed and memory are not.
        metrics = context.workspace.home / "metrics" / f"{scratch.name}.jsonl"
        sinks = open_sinks(context.config.train.sinks, metrics, run=run)
        try:
            return train(
                context.path(self.source),
                self.records,
                self.config if self.teacher is None else self.config.with_teacher(context.path(self.teacher.id)),
                context.config.task,
                seed=context.seed("train"),
                out=out,
                scratch=scratch,
                sink=sinks,
                difficulties=self.difficulties,
                weights=self.weights,
                held_out=None if evaluate.data is None else HeldOut(score=score),
            )
        finally:
            sinks.close()


def training_dataset(context: RoundContext) -> str:
    """Returns the id of the set that the round trains on: as pairs or with pseudo-labels if the config says so."""
    outputs = context.state.outputs
    return outputs.get(HardNegativePairs.name) or outputs.get(PseudoLabel.name) or context.state.id("dataset")


def _steering_evaluation(context: RoundContext, champion: str, test: str) -> str | None:
    """Returns the champion's evaluation if it steers the loss: not that of the base model, which knows no label."""
    base = finished_states(context.workspace)[0].candidate
    if not context.config.evaluate.error_weight or champion == base:
        return None
    return context.run(Evaluate(champion, test)).id


def _error_weights(context: RoundContext, records: pa.Table, evaluation: str) -> np.ndarray:
    """Returns the weight of each record by the recall of its label, float64 [records]; 1 for a label without one."""
    main = next(iter(read_evaluation(context.path(evaluation)).values()))
    weight_of = recall_weights(main.per_class, context.config.evaluate.error_weight)
    return np.array([weight_of.get(label, 1.0) for label in records["completion"].to_pylist()])
