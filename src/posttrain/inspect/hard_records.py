"""Lists the records that the champion finds hardest, and pairs of labelled records with their hard negatives."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet

from posttrain.data.records.provenance import HARD_NEGATIVE
from posttrain.evaluate.suite import read_evaluation
from posttrain.loop.config import Config
from posttrain.loop.context import RoundContext
from posttrain.loop.history import finished_rounds, parent_dataset
from posttrain.loop.model_registry import ModelRegistry
from posttrain.loop.score_files import LABELLED, SCORES, load_array
from posttrain.loop.stages.collect import collect
from posttrain.loop.stages.evaluate import Evaluate
from posttrain.loop.stages.negatives import pair_records
from posttrain.loop.stages.score import Score
from posttrain.loop.suites import check_suite_files
from posttrain.models.task import record_turns
from posttrain.select.hard_cases import above_percentile, losses, nearest_hard_case
from posttrain.select.hard_negatives import Confusions, confused_labels
from posttrain.select.scores.table import embed_records, score_labelled
from posttrain.store.errors import UserError
from posttrain.store.workspace import Workspace


@dataclass(frozen=True)
class HardRecords:
    """Records whose loss or entropy is above a percentile, the hardest first.

    Attributes:
        champion: Id of the model.
        training: Of the training set: ``id, input, completion, loss`` (nats per token of the right answer).
        pool: Of the scored pool records without a label: ``id, input, predicted, entropy`` (nats).
        test: Of the first suite: ``id, expected, predicted, loss`` (nats, or 1 - score).
        counts: Number of records with a loss or an entropy, by the names of these lists.
    """

    champion: str
    training: list[dict[str, Any]]
    pool: list[dict[str, Any]]
    test: list[dict[str, Any]]
    counts: dict[str, int]


def hard_records(workspace: Workspace, config: Config, percentile: float) -> HardRecords:
    """Lists the records whose loss or entropy is above a percentile.

    Raises:
        UserError: no champion has been trained yet.
    """
    with _score_by_champion(workspace, config) as scored:
        context, stage, labelled, predictions = scored.context, scored.stage, scored.labelled, scored.predictions
        loss = score_labelled(stage.scoring, labelled, ["loss"])
        scores = parquet.read_table(context.path(scored.scores) / SCORES, columns=["id", "predicted", "entropy"])
        pool = context.dataset(stage.pool).records
    test_loss, entropy = losses(predictions), scores["entropy"].to_numpy(zero_copy_only=False)
    training_loss = loss["loss"].to_numpy()
    test = predictions.select(["id", "expected", "predicted"]).to_pylist()
    return HardRecords(
        stage.champion,
        _hardest(loss.select(["id"]).to_pylist(), "loss", training_loss, percentile, labelled),
        _hardest(scores.select(["id", "predicted"]).to_pylist(), "entropy", entropy, percentile, pool),
        _hardest(test, "loss", test_loss, percentile),
        {"training": len(training_loss), "pool": len(entropy), "test": len(test_loss)},
    )


@dataclass(frozen=True)
class HardPairs:
    """Labelled records with the label of their hard negative as the rejected answer.

    Attributes:
        pairs: RECORD table; those near a test error come first, then by similarity to the hard negative.
        confusions: The pairs of labels that the champion confuses, with the number of its test errors.
        is_confused: Whether pairs are of confused labels alone; else of any two labels, as nothing is confused.
    """

    pairs: pa.Table
    confusions: Confusions
    is_confused: bool


def hard_pairs(workspace: Workspace, config: Config) -> HardPairs:
    """Finds pairs of labelled records and hard negatives, of labels that the champion confuses where it does.

    Test errors say which labels these are, and which training records come first; no test record is in a pair.

    Raises:
        UserError: the task has no label set, or all training records have one label; or no champion has been trained.
    """
    labels = config.task.label_set
    if not labels:
        what = "hard negatives are records of another label, and free text has none"
        raise UserError(what, where="task.labels", fix="name the labels")
    with _score_by_champion(workspace, config) as scored:
        context, labelled = scored.context, scored.labelled
        if len(set(labelled["completion"].to_pylist())) < 2:
            raise UserError("all training records have one label, and hard negatives need another", fix="posttrain run")
        confusions = confused_labels(scored.predictions, labels)
        embeddings = load_array(context.path(scored.scores) / LABELLED)
        assert embeddings is not None, "there are labelled records"
        errors = embed_records(scored.stage.scoring, scored.test_errors())
        near_error = nearest_hard_case(embeddings, errors) >= 0
    pairs = pair_records(labelled, embeddings, labels, confusions)
    marks = [json.loads(meta).get(HARD_NEGATIVE) for meta in pairs["meta"].to_pylist()]
    mined = [row for row, mark in enumerate(marks) if mark]
    confused = [row for row in mined if marks[row]["confused"]]
    rows = confused or mined
    if not rows:
        raise UserError("all training records have a rejected answer already", fix="posttrain data export train FILE")
    rows.sort(key=lambda row: (not near_error[row], -marks[row]["similarity"], row))
    return HardPairs(pairs.take(pa.array(rows, pa.int64())), confusions, bool(confused))


@dataclass(frozen=True)
class _Scored:
    """The champion with its scores of the pool and its answers to the test records.

    Attributes:
        stage: The stage that scored.
        scores: Id of its scores.
        predictions: Of the first suite.
    """

    context: RoundContext
    stage: Score
    scores: str
    predictions: pa.Table

    @property
    def labelled(self) -> pa.Table:
        """The training set so far."""
        return self.context.dataset(self.stage.train).records

    def test_errors(self) -> pa.Table:
        """Returns the test records that the champion answers wrongly."""
        wrong = self.predictions.filter(pa.array(self.predictions["score"].to_numpy() < 1))["id"]
        records = self.context.dataset(self.stage.test).records
        return records.filter(pa.compute.is_in(records["id"], value_set=wrong.combine_chunks()))


@contextmanager
def _score_by_champion(workspace: Workspace, config: Config) -> Iterator[_Scored]:
    """Scores the pool and measures the champion, or finds that in the store."""
    rounds, champion = finished_rounds(workspace), ModelRegistry(workspace).champion
    if champion is None or not rounds or champion.model_id == rounds[0].candidate:
        raise UserError("no model has been trained yet that could find records hard", fix="posttrain run")
    check_suite_files(config, workspace.root)
    with workspace.work():
        context = RoundContext(workspace, config, len(rounds), in_round=False)
        collected = collect(context)
        pool, test = collected.pool.id, collected.test.id
        evaluation = context.run(Evaluate(champion.model_id, test))
        main = next(iter(read_evaluation(context.path(evaluation.id)).values()))
        train = parent_dataset(workspace)
        stage = Score.from_context(context, champion.model_id, pool, train, test, evaluation.id, cold=False)
        yield _Scored(context, stage, context.run(stage).id, main.predictions)


def _hardest(
    rows: list[dict[str, Any]], name: str, values: np.ndarray, percentile: float, records: pa.Table | None = None
) -> list[dict[str, Any]]:
    """Returns the rows above the percentile with their value, and with input and answer where records are given."""
    contents = {} if records is None else {record["id"]: record for record in records.to_pylist()}
    hardest = []
    for index in above_percentile(np.asarray(values, np.float64), percentile).tolist():
        row = {**rows[index], name: float(values[index])}
        if record := contents.get(row["id"]):
            row["input"] = " / ".join(turn["content"] for turn in record_turns(record))
            row |= {} if record["completion"] is None else {"completion": record["completion"]}
        hardest.append(row)
    return hardest
