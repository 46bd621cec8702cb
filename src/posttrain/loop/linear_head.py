"""The linear head on sentence embeddings that a round's labels give: for models that label, and as a yardstick."""

import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet

from posttrain.evaluate.scorers.base import sample_records
from posttrain.label.annotator import labelled_by_model
from posttrain.loop.context import RoundContext
from posttrain.loop.record import RoundRecord
from posttrain.loop.scoring import head_embedder, sentence_embeddings
from posttrain.loop.stage import CachedWork
from posttrain.loop.state import RoundState
from posttrain.loop.suites import suite_digests, suite_records
from posttrain.models.binomial import clopper_pearson
from posttrain.models.embedder_source import embedder_key
from posttrain.models.linear_head import LinearHead, fit_linear_head
from posttrain.store.errors import UserError
from posttrain.store.message import Message

log = logging.getLogger("posttrain")

OUT_OF_FOLD, HEAD_SCORES = "out_of_fold.parquet", "scores.json"
"""Predictions of heads that did not learn from the record, and for each test record True if the head is right."""

HEAD_RESULT = "linear head"
"""Name under which a round's state has the evaluation of the head, or the reason why there is none."""


@dataclass(frozen=True)
class FitHead(CachedWork):
    """Trains a head on the labels that people gave, which are all but those of models.

    Args:
        dataset: Id of the training set with the labels.
        embedder: Key of the sentence model.
    """

    dataset: str
    embedder: str
    name = "head"
    kind = "head"
    seeded = False

    def inputs(self, context: RoundContext) -> dict[str, str]:
        """Returns the labels and the sentence model."""
        return {"dataset": self.dataset, "embedder": self.embedder}

    def settings(self, context: RoundContext) -> dict[str, Any]:
        """Returns the label set."""
        return {"labels": context.config.task.label_set}

    def run(self, context: RoundContext, out: Path, scratch: Path) -> dict[str, Any]:
        """Writes the head and its predictions out of fold; nothing where the labels are too few."""
        labels = context.config.task.label_set
        records = people_labels(context.dataset(self.dataset).records, labels)
        answers, inputs = records["completion"].to_pylist(), records["input_id"].to_pylist()
        embeddings = sentence_embeddings(context, str(context.config.label.embedder), records)
        fitted = fit_linear_head(embeddings, answers, labels, inputs, embedder=self.embedder)
        if fitted is None:
            return {"fitted": False, "records": len(answers)}
        fitted.head.save(out)
        columns = {
            "input_id": inputs,
            "label": answers,
            "predicted": [fitted.head.labels[index] for index in fitted.out_of_fold.argmax(axis=1).tolist()],
            "confidence": np.round(fitted.out_of_fold.max(axis=1), 6),
        }
        parquet.write_table(pa.table(columns), out / OUT_OF_FOLD)
        return {"fitted": True, **fitted.head.report}


@dataclass(frozen=True)
class EvaluateHead(CachedWork):
    """Measures a head on the records of the main suite.

    Args:
        head: Id of the head.
        test: Id of the test set.
    """

    head: str
    test: str
    name = "head evaluation"
    kind = "head_evaluation"
    seeded = False

    def inputs(self, context: RoundContext) -> dict[str, str]:
        """Returns the head, the test set and the main suite's file."""
        return {"head": self.head, "test": self.test, **suite_digests(context.config, context.workspace.root)}

    def settings(self, context: RoundContext) -> dict[str, Any]:
        """Returns the main suite's data and sample."""
        suite = _main_suite(context)
        return {"data": suite.data, "columns": suite.columns, "sample": suite.sample}

    def run(self, context: RoundContext, out: Path, scratch: Path) -> dict[str, Any]:
        """Writes the scores by record; returns accuracy and interval."""
        suite, head = _main_suite(context), LinearHead.load(context.path(self.head))
        records = sample_records(suite_records(context, suite, self.test), suite.sample)
        embeddings = sentence_embeddings(context, str(context.config.label.embedder), records)
        predicted = np.array(head.labels, object)[head.probabilities(embeddings).argmax(axis=1)]
        right = predicted == np.array(records["completion"].to_pylist(), object)
        scores = dict(zip(records["id"].to_pylist(), right.astype(int).tolist(), strict=True))
        (out / HEAD_SCORES).write_text(json.dumps(scores), encoding="utf-8")
        low, high = clopper_pearson(int(right.sum()), len(right))
        labels = context.artifact(self.head).meta["records"]
        return {"accuracy": float(right.mean()), "low": low, "high": high, "n": len(right), "labels": labels}


def people_labels(records: pa.Table, labels: list[str]) -> pa.Table:
    """Returns the records whose label is of the set, and of people or a file: none that a model gave."""
    allowed = set(labels)
    by_model = labelled_by_model(records)
    kept = [
        answer in allowed and not model
        for answer, model in zip(records["completion"].to_pylist(), by_model, strict=True)
    ]
    return records.filter(pa.array(kept, pa.bool_()))


def fit_head(context: RoundContext, dataset: str) -> str | None:
    """Trains or finds the head of a training set; returns its id, or None where there can be none.

    There is none without a closed label set, without the sentence model, and of too few labels.
    """
    if not context.config.task.label_set or not context.dataset(dataset).records.num_rows:
        return None
    embedder = head_embedder(context.config.label.embedder)
    if embedder is None:
        return None
    head = context.run(FitHead(dataset, embedder))
    return head.id if head.meta["fitted"] else None


def measure_head(context: RoundContext) -> RoundState:
    """Measures what the linear head alone reaches with the round's labels; returns the state with the result.

    The head is a yardstick: a sentence model that is missing or damaged is named in the state, and ends no round.
    """
    state = context.state.without(HEAD_RESULT)
    name = context.config.label.embedder
    if state.dataset is None or state.test is None or name is None or not context.config.task.label_set:
        return state
    try:
        head = fit_head(context, state.dataset)
        if head is None and head_embedder(name) is None:
            embedder_key(name)  # raises the reason
        result = context.run(EvaluateHead(head, state.test)) if head else None
    except UserError as error:
        log.warning("  no linear head is measured: %s", error)
        return state.with_result(HEAD_RESULT, str(error))
    if result is None:
        return state.with_result(HEAD_RESULT, f"the training set's {state.labels or 0} labels are too few")
    log.info("  a linear head on the same labels: accuracy %.3f", result.meta["accuracy"])
    return state.with_output(HEAD_RESULT, result.id)


def head_report(record: RoundRecord) -> tuple[dict[str, Any] | None, str]:
    """Returns what the linear head of a round reached: accuracy, low, high, n, labels; and a sentence.

    The first is None where none was measured, the second says why, and is "" where there is none to measure.
    """
    state, artifact = record.state, record.artifact(record.state.outputs.get(HEAD_RESULT))
    if artifact is None:
        why = state.results.get(HEAD_RESULT)
        return None, Message("No linear head was measured: {why}.", why=why) if why and state.labels else ""
    template = (
        "A linear head on sentence embeddings reaches {accuracy:.1%} ({low:.1%} to {high:.1%}) with the same {labels} "
        "labels"
    )
    sentence = Message(template, **artifact.meta)
    accuracy = (state.metrics or {}).get("accuracy")
    if accuracy is None:
        return dict(artifact.meta), Message("{head}.", head=sentence)
    return dict(artifact.meta), Message("{head}; this model {accuracy:.1%}.", head=sentence, accuracy=accuracy)


def _main_suite(context: RoundContext) -> Any:
    return next(iter(context.config.evaluate.suites.values()))
