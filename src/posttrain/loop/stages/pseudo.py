"""Pseudo: adds a model's confident answers on the unlabelled pool to a copy of the round's training set.

Each round makes them afresh from labels of people; the next round builds on the training set without them.

Sources: D.-H. Lee, Pseudo-Label, ICML 2013 workshop; Q. Xie et al., Self-training with Noisy Student, CVPR 2020
(arXiv:1911.04252), section 2 for confident labels.
"""

import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from posttrain.data.records.provenance import PSEUDO
from posttrain.data.records.record import assign_ids, concat
from posttrain.data.sets.training_set import next_training_set
from posttrain.data.versions.version import write_dataset
from posttrain.label.model_annotators import PSEUDO_PER_LABEL, Predictions, PseudoConfig, Teacher
from posttrain.loop.context import RoundContext
from posttrain.loop.linear_head import people_labels
from posttrain.loop.record import RoundRecord, StageReport
from posttrain.loop.stage import Stage
from posttrain.loop.stages.dataset import training_set_settings
from posttrain.loop.stages.score import dropped_records, free_records
from posttrain.loop.state import RoundState
from posttrain.loop.suites import measured_on, suite_inputs
from posttrain.loop.teachers import build_teacher, calibrated
from posttrain.report.section import Text
from posttrain.select.pool_sample import sample_pool
from posttrain.store.message import Message

log = logging.getLogger("posttrain")

_CANDIDATES = 2  # pool records that a teacher without a price per answer predicts, for each pseudo-label wanted


@dataclass(frozen=True)
class PseudoLabel(Stage):
    """Labels pool records by a teacher, and adds those of which it is confident to the training set.

    Args:
        dataset: Id of the round's training set, with labels of people.
        pool: Id of the pool.
        test: Id of the test set, whose records and near duplicates are removed.
        teacher: The model.
    """

    dataset: str
    pool: str
    test: str
    teacher: Teacher
    name = "pseudo"
    title = Message("pseudo-labels")
    kind = "dataset"

    @classmethod
    def execute(cls, context: RoundContext) -> RoundState:
        """Makes the pseudo-labels, if the config asks for them."""
        state, config = context.state, context.config.label.pseudo
        if config is None or state.dataset is None:
            # Those of an earlier attempt go, as the config has changed since.
            return state.without(cls.name)
        teacher = build_teacher(context, config.teacher, state.dataset)
        artifact = context.run(cls(state.dataset, state.id("pool"), state.id("test"), teacher))
        counts = artifact.meta[PSEUDO]
        log.info("  %d pseudo-labels by %s join training", counts["records"], counts["teacher"])
        return state.with_output(cls.name, artifact.id)

    @classmethod
    def report(cls, record: RoundRecord) -> StageReport:
        """Reports the pseudo-labels that joined the training."""
        artifact = record.artifact(record.state.outputs.get(cls.name))
        count = artifact.meta[PSEUDO]["records"] if artifact else 0
        sentence = Message("{count} pseudo-labels of a model joined its training", count=count)
        return StageReport({"pseudo_labels": count}, blocks=[Text(sentence, "sentence")] if count else ())

    def inputs(self, context: RoundContext) -> dict[str, str]:
        """Returns the labels, the pool, what models are measured on, and what the teacher's answers depend on."""
        inputs = {"dataset": self.dataset, "pool": self.pool, "test": self.test, **self.teacher.inputs()}
        return inputs | suite_inputs(context.config, context.workspace.root)

    def settings(self, context: RoundContext) -> dict[str, Any]:
        """Returns the section of pseudo-labels, the teacher's settings, and the steps that clean training records."""
        own = {"pseudo": _config(context).model_dump(mode="json"), "options": dict(self.teacher.settings())}
        dropped = dropped_records(context)
        return own | training_set_settings(context) | ({"dropped": dropped} if dropped else {})

    def run(self, context: RoundContext, out: Path, scratch: Path) -> dict[str, Any]:
        """Writes the training set with the pseudo-labels; the labels of people come first, as they are."""
        root, config, seed = context.workspace.root, _config(context), context.seed(self.name)
        parent = context.dataset(self.dataset)
        labels = context.config.task.label_set
        labelled = people_labels(parent.records, labels)
        wanted = PSEUDO_PER_LABEL * labelled.num_rows
        # Each answer of an endpoint has a price; the others are nearly free.
        factor = 1 if "endpoint" in context.config.label.teachers else _CANDIDATES
        free = free_records(context, context.dataset(self.pool).records, parent.records)
        candidates = sample_pool(free, factor * wanted, seed)
        predictions = self.teacher.predict(candidates)
        confidence = calibrated(self.teacher, predictions, labelled)
        kept = predictions.answered & (np.nan_to_num(confidence, nan=-1.0) >= config.confidence)
        pseudo = _pseudo_records(candidates, predictions, confidence, kept, self.teacher.name, config.weight)
        pseudo = sample_pool(pseudo, wanted, seed)
        measured = measured_on(context.config, context.dataset(self.test).records, root)
        version = next_training_set(
            parent,
            pseudo,
            parent_id=self.dataset,
            labels=labels or None,
            steps=[step.located(root) for step in context.config.data.every_round_steps],
            evaluation=concat(list(measured.values())),
        )
        joined = sum(is_pseudo(meta) for meta in version.records["meta"].to_pylist())
        counts = {"teacher": self.teacher.name, "records": joined, "candidates": candidates.num_rows}
        meta = {**version.meta, "name": PSEUDO, PSEUDO: {**counts, "weight": config.weight}}
        return write_dataset(out, version.records, version.rejected, meta)


def _config(context: RoundContext) -> PseudoConfig:
    config = context.config.label.pseudo
    assert config is not None, "the config asks for pseudo-labels"
    return config


def _pseudo_records(
    records: pa.Table,
    predictions: Predictions,
    confidence: np.ndarray,
    kept: np.ndarray,
    teacher: str,
    weight: float,
) -> pa.Table:
    """Returns the kept records with their answers, marked in ``meta``."""
    rows = np.flatnonzero(kept)
    chosen = records.take(pa.array(rows, pa.int64()))
    metas = []
    for row, before in zip(rows.tolist(), chosen["meta"].to_pylist(), strict=True):
        mark: dict[str, Any] = {"teacher": teacher, "confidence": round(float(confidence[row]), 6)}
        mark["weight"] = weight
        metas.append(json.dumps({**json.loads(before or "{}"), PSEUDO: mark}, ensure_ascii=False, sort_keys=True))
    answers = [predictions.answers[row] for row in rows.tolist()]
    for name, values in (("completion", answers), ("meta", metas)):
        chosen = chosen.set_column(chosen.schema.get_field_index(name), name, pa.array(values, pa.string()))
    return assign_ids(chosen)


def is_pseudo(meta: str | None) -> bool:
    """Returns whether a record's ``meta`` marks it as a pseudo-label."""
    return PSEUDO in json.loads(meta or "{}")


def pseudo_weights(records: pa.Table) -> np.ndarray | None:
    """Returns the weight of each record in the loss; None where there are no pseudo-labels.

    Args:
        records: RECORD table of a training set.
    """
    marks = [json.loads(text or "{}").get(PSEUDO) for text in records["meta"].to_pylist()]
    weights = [float(mark["weight"]) if mark else 1.0 for mark in marks]
    return np.array(weights) if any(weight != 1.0 for weight in weights) else None
