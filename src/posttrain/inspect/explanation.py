"""Explains a record of a workspace: why the champion answers it so, why it was chosen, who labelled it."""

import json
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as compute
import pyarrow.parquet as parquet

from posttrain.evaluate.suite import read_evaluation
from posttrain.inspect.answer_influence import answer_influence, find_training_run
from posttrain.inspect.labelled_records import cosine_similarities, inputs
from posttrain.loop.config import Config
from posttrain.loop.context import RoundContext, input_ids
from posttrain.loop.history import finished_rounds, finished_states, parent_dataset
from posttrain.loop.model_registry import ModelRegistry
from posttrain.loop.score_files import BATCH, LABELLED_SCORES, LABELS, UNSCORED, read_champion_scores
from posttrain.loop.state import RoundState
from posttrain.loop.suites import suite_records
from posttrain.models.task import record_turns
from posttrain.store.errors import DamagedArtifactError, UserError
from posttrain.store.rows import Run
from posttrain.store.workspace import Workspace

log = logging.getLogger("posttrain")

RecordKind = Literal["evaluated", "training", "pool"]

_MIN_PREFIX = 4


def explain(workspace: Workspace, config: Config, text: str, *, among: int = 300, count: int = 5) -> dict[str, Any]:
    """Explains a record, according to the set that it is in.

    Args:
        workspace: The workspace.
        config: Its config.
        text: The record's id, its input's, or the beginning of one.
        among: Number of training records to score by influence on an evaluated record's answer.
        count: Number of records to return of each kind.

    Returns:
        ``kind`` and ``record``. For an ``evaluated`` record ``suite``, ``prediction`` and the results of
        `posttrain.inspect.answer_influence.answer_influence`: ``towards`` and ``against`` the answer. For a ``pool``
        record ``rounds``, their entries of it, and ``nearest``, labelled records. For a ``training`` record
        ``rounds``, ``since`` (the first round that trained on it) and ``labelled_by``.

    Raises:
        UserError: nothing has run yet, or the text names no record, or several; the champion is untrained, or was
            trained by an objective that learns no answers.
    """
    context = RoundContext(workspace, config, 0, in_round=False)
    with workspace.work():
        located = find_record(context, text)
        entry = {"kind": located.kind, "record": _record_fields(located.record)}
        if located.kind == "evaluated":
            return {**entry, "suite": located.suite, **_explain_evaluated(context, located, among, count)}
        rounds = record_rounds(context, located.record["input_id"])
        if located.kind == "training":
            since = first_training_round(context, located.record["input_id"])
            return {**entry, "rounds": rounds, "since": since, "labelled_by": annotation_of(located.record)}
        nearest = nearest_labelled(context, located.record, parent_dataset(workspace), count)
        return {**entry, "rounds": rounds, "nearest": nearest}


@dataclass(frozen=True)
class LocatedRecord:
    """A record and the kind of set that it is in.

    Attributes:
        kind: The set; if several hold the record, the first in the order of `RecordKind`.
        record: Its row of RECORD.
        suite: Name of the suite, where it is evaluated.
        prediction: Its row of the champion's predictions there; None where the suite's sample leaves it out.
    """

    kind: RecordKind
    record: dict[str, Any]
    suite: str | None = None
    prediction: dict[str, Any] | None = None


def _explain_evaluated(context: RoundContext, located: LocatedRecord, among: int, count: int) -> dict[str, Any]:
    if located.prediction is None:
        message = f"the suite `{located.suite}` measures a sample without this record"
        raise UserError(message, fix="posttrain eval --full")
    if not record_turns(located.record):
        raise UserError("it is a text without an answer, and influence is computed for answers")
    trained = find_training_run(context, ModelRegistry(context.workspace).champion_id)
    if trained is None:
        raise UserError(
            "the champion is the base model, which was trained on none of your records", fix="posttrain run"
        )
    predicted, expected = located.prediction["predicted"], located.prediction["expected"]
    wrong = expected is not None and predicted != expected and not located.prediction["score"] >= 1
    # A wrong answer is explained against the right one: what pushed towards both explains neither.
    instead = expected if wrong else None
    influence = answer_influence(context, trained, located.record, predicted, instead, among)
    rows = influence.table.to_pylist()
    return {
        "prediction": located.prediction,
        "instead": instead,
        "parameters": influence.parameters,
        "looked_at": len(rows),
        "training": influence.training,
        "towards": [row for row in rows if row["influence"] > 0][:count],
        "against": [row for row in reversed(rows) if row["influence"] < 0][:count],
    }


def _record_fields(record: dict[str, Any]) -> dict[str, Any]:
    text = " / ".join(turn["content"] for turn in record_turns(record))
    return {**{name: record[name] for name in ("id", "input_id", "completion", "source", "line")}, "input": text}


def find_record(context: RoundContext, text: str) -> LocatedRecord:
    """Finds the record whose id, or whose input's id, begins with ``text``.

    Raises:
        UserError: nothing has run yet, the text is too short, or it names no record or records of several inputs.
    """
    if ModelRegistry(context.workspace).champion is None or not finished_rounds(context.workspace):
        raise UserError("there is no champion yet", fix="posttrain run")
    # A shorter prefix nearly always names several records, after all tables have been read.
    if len(text) < _MIN_PREFIX:
        raise UserError(f"`{text}` is too short", fix=f"give at least {_MIN_PREFIX} characters of the id")
    evaluation = last_evaluation(context)
    matches = [
        (kind, suite, row)
        for kind, suite, table in _searched_tables(context, evaluation)
        for row in table.filter(_has_prefix(table, text)).to_pylist()
    ]
    if not matches:
        fix = "posttrain select lists ids of the pool, posttrain show train@v1 those of a training set"
        raise UserError(f"no record here is called `{text}`", fix=fix)
    if (several := len({row["input_id"] for _, _, row in matches})) > 1:
        raise UserError(f"`{text}` could be records of {several} inputs", fix="give more of the id")
    kind, suite, record = matches[0]
    # A label gives a record another id, so that a pool record is looked up among the training records by its input.
    if kind == "pool":
        training_set = context.dataset(parent_dataset(context.workspace)).records
        same = training_set.filter(compute.equal(training_set["input_id"], record["input_id"])).to_pylist()
        kind, record = ("training", same[0]) if same else (kind, record)
    if kind != "evaluated" or suite is None or evaluation is None:
        return LocatedRecord(kind, record)
    table = read_evaluation(context.path(str(evaluation.output)))[suite].predictions
    rows = table.filter(compute.equal(table["id"], record["id"])).to_pylist()
    return LocatedRecord(kind, record, suite, rows[0] if rows else None)


def last_evaluation(context: RoundContext) -> Run | None:
    """Finds the run that last measured the champion; None if it was never measured."""
    champion = ModelRegistry(context.workspace).champion_id
    finished = [run for run in context.workspace.metadata.runs(stage="evaluate", status="done") if run.output]
    runs = [run for run in finished if run.inputs.get("model") == champion]
    return max(runs, key=lambda run: run.started_at, default=None)


def last_pool(context: RoundContext) -> str:
    """Returns the id of the last finished round's pool."""
    return finished_states(context.workspace)[-1].id("pool")


def _searched_tables(
    context: RoundContext, evaluation: Run | None
) -> Iterator[tuple[RecordKind, str | None, pa.Table]]:
    # Evaluated records first: a test record may lie in the pool's file too, and the question is about its answer.
    if evaluation is not None:
        measured = read_evaluation(context.path(str(evaluation.output)))
        for name, suite in context.config.evaluate.suites.items():
            if name in measured:
                yield "evaluated", name, suite_records(context, suite, evaluation.inputs["test"])
    yield "training", None, context.dataset(parent_dataset(context.workspace)).records
    yield "pool", None, context.dataset(last_pool(context)).records


def _has_prefix(table: pa.Table, text: str) -> pa.ChunkedArray:
    return compute.or_(compute.starts_with(table["id"], text), compute.starts_with(table["input_id"], text))


def record_rounds(context: RoundContext, input_id: str) -> list[dict[str, Any]]:
    """Reads the entry of an input in each round that considered it: ``round, scores, chosen, labelled``.

    ``scores`` are the columns of the score table that are one number or word each, or those of `LABELLED_SCORES` where
    the record had a label, null where the champion did not score it; ``chosen`` holds ``reason``, ``why`` and
    ``rank``, ``labelled`` the ``label`` and its annotator; None where there is nothing.
    """
    entries: list[dict[str, Any]] = []
    for entry in context.workspace.metadata.rounds():
        batch = (state := RoundState.from_row(entry)).batch
        if batch is None:
            continue
        try:
            entries += _round_entry(context, entry.number, input_id, labels=state.labelled, **batch)
        except DamagedArtifactError as error:
            log.warning("%s; the entry of round %d is left out", error, entry.number)
    return entries


def first_training_round(context: RoundContext, input_id: str) -> int | None:
    """Finds the first round whose training set holds the input; None if no finished round's does."""
    for entry in finished_rounds(context.workspace):
        dataset = RoundState.from_row(entry).dataset
        try:
            if dataset and input_id in input_ids(context, dataset):
                return entry.number
        except DamagedArtifactError as error:
            log.warning("%s; the training set of round %d is not searched", error, entry.number)
    return None


def _round_entry(
    context: RoundContext, number: int, input_id: str, *, pool: str, scores: str, selection: str, labels: str | None
) -> list[dict[str, Any]]:
    """Reads the entry of an input in one round; returns a list of one, or an empty one if its pool did not hold it."""
    records = context.dataset(pool).records
    ids = records.filter(compute.equal(records["input_id"], input_id))["id"].to_pylist()
    if not ids:
        return []
    folder, batch = context.path(scores), context.path(selection)
    row = _find_row(read_champion_scores(folder, batch), ids[0])
    if row is None and (folder / UNSCORED).exists():
        row = _find_row(parquet.read_table(folder / UNSCORED), ids[0])
    if row is None and (folder / LABELLED_SCORES).exists():
        # By the input: the label gave the record another id than it has in the pool.
        row = _find_row(parquet.read_table(folder / LABELLED_SCORES), input_id, "input_id")
    chosen = _find_row(parquet.read_table(batch / BATCH), ids[0])
    labelled = None
    if chosen and labels:
        labelled = _find_row(parquet.read_table(context.path(labels) / LABELS), ids[0])
    if not row and not chosen:
        return []
    return [
        {
            "round": number,
            "scores": row,
            "chosen": chosen and {name: chosen.get(name) for name in ("reason", "why", "rank")},
            "labelled": labelled and {"label": labelled["completion"], **_provenance(labelled)},
        }
    ]


def annotation_of(record: dict[str, Any]) -> dict[str, Any] | None:
    """Returns the annotator of a training record; None if the label is from a file."""
    return _provenance(record).get("labelled_by")


def nearest_labelled(context: RoundContext, record: dict[str, Any], dataset: str, count: int) -> list[dict[str, Any]]:
    """Finds the labelled records whose inputs are nearest to a record's, by the cosine of the champion's embeddings.

    Returns:
        ``id, label, input, similarity, source, line``, the nearest first; of equal ones the earlier in the set.
    """
    labelled = context.dataset(dataset).records
    if not labelled.num_rows:
        return []
    similarity = cosine_similarities(context, record, dataset)
    # Stable: of equally similar records the earlier one, on every machine.
    rows = np.argsort(-similarity, kind="stable")[:count]
    near = labelled.take(pa.array(rows))
    columns = zip(near.to_pylist(), inputs(near), similarity[rows].tolist(), strict=True)
    return [
        {"id": row["id"], "label": row["completion"], "input": text, "similarity": cosine}
        | {name: row[name] for name in ("source", "line")}
        for row, text, cosine in columns
    ]


def _find_row(table: pa.Table, id: str, by: str = "id") -> dict[str, Any] | None:
    """Finds the row of an id; returns it without columns that are lists."""
    # Embeddings and probabilities have hundreds of numbers, which explain nothing to a reader.
    plain = [field.name for field in table.schema if field.name != "embedding" and not _is_list(field.type)]
    rows = table.filter(compute.equal(table[by], id)).select(plain).to_pylist()
    return rows[0] if rows else None


def _is_list(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_fixed_size_list(kind) or pa.types.is_large_list(kind))


def _provenance(record: dict[str, Any]) -> dict[str, Any]:
    meta = json.loads(record.get("meta") or "{}")
    return {"labelled_by": meta["labelled_by"]} if "labelled_by" in meta else {}
