"""Drift: compares the inputs that are new in this round with those that the last round knew."""

import logging
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as compute

from posttrain.data.report.drift import hashed_ngrams
from posttrain.loop.context import RoundContext, model_key
from posttrain.loop.drift import (
    CONFIDENCE,
    DriftValues,
    cluster_drift,
    confidence_drift,
    drift_sentence,
    embedding_drift,
)
from posttrain.loop.history import finished_states
from posttrain.loop.record import LoopRecord, RoundRecord, StageReport
from posttrain.loop.scoring import head_embedder, scoring_for, sentence_embeddings
from posttrain.loop.stage import Stage
from posttrain.loop.state import RoundState
from posttrain.loop.tuning import tuning_rule
from posttrain.models.task import record_turns
from posttrain.report.charts.curve import CurveStyle, compared_curves
from posttrain.report.formatting import number_text
from posttrain.report.section import Section, Text
from posttrain.select.pool_sample import sample_pool
from posttrain.select.scores.table import score_records
from posttrain.store.message import Message

log = logging.getLogger("posttrain")

_CAPTION = Message(
    "How far the inputs that were new in a round lie from those that the loop knew, and the champion's confidence on "
    "them from that on known ones: population stability indices, less what chance gives. Below 0.1 there is little "
    "drift, from 0.25 on it is large."
)

_MAX_SCORED = 300
"""Records of each side whose confidence is compared: unlike an embedding, each takes a pass of the champion."""


@dataclass(frozen=True)
class MeasureDrift(Stage):
    """Measures drift between two states of the loop's inputs.

    Args:
        pool: Id of the pool of today; ``labelled`` of the records of labelled files.
        known_pool: Id of the last round's pool; ``known_training`` of the training set that it left.
        champion: Id of the model whose confidence is compared; None where no rule uses it.
    """

    pool: str
    labelled: str
    known_pool: str
    known_training: str
    champion: str | None
    name = "drift"
    title = Message("drift")
    kind = "drift"
    seeded = False

    @classmethod
    def execute(cls, context: RoundContext) -> RoundState:
        """Measures the drift since the last round, which the report shows and the gate may use."""
        state = context.state
        values, id = measure_drift(context, state.id("pool"), state.id("files"), state.id("champion"))
        if not math.isnan(values.psi):
            log.info("  %d new inputs: drift.psi %.3f, drift.mmd_p %.3f", values.new, values.psi, values.mmd_p)
        return state.with_output(cls.name, id)

    @classmethod
    def report(cls, record: RoundRecord) -> StageReport:
        """Reports the drift; None with too few new inputs to measure it."""
        artifact = record.artifact(record.state.outputs.get(cls.name))
        drift = dict(artifact.meta) if artifact and artifact.meta["psi"] is not None else None
        return StageReport({"drift": drift}, [drift_sentence(drift)] if drift else ())

    @classmethod
    def sections(cls, loop: LoopRecord) -> Iterator[Section]:
        """Yields the drift by round."""
        drifts = {record.number: drift for record in loop.done if (drift := cls.report(record).values["drift"])}
        numbers = np.array(list(drifts), np.float64)
        curves = [
            # None, where nothing was measured, becomes NaN.
            (name, numbers, np.array([fields[key] for fields in drifts.values()], np.float64))
            for key, name in (("psi", Message("inputs")), ("confidence", Message("confidence")))
        ]
        style = CurveStyle(number_text, mean=False)
        chart = compared_curves(curves, Message("stability index"), style, axis=Message("round"))
        if chart is not None:
            yield Section(Message("Drift"), [Text(_CAPTION, "caption"), chart])

    def inputs(self, context: RoundContext) -> dict[str, str]:
        """Returns the sets, the sentence model, and the model whose confidence is compared."""
        sets = {"pool": self.pool, "labelled": self.labelled}
        known = {"known pool": self.known_pool, "known training": self.known_training}
        embedder = head_embedder(context.config.drift.embedder)
        return {
            **sets,
            **known,
            **({"embedder": embedder} if embedder else {}),
            **({"champion": self.champion} if self.champion else {}),
        }

    def settings(self, context: RoundContext) -> dict[str, Any]:
        """Returns the drift section, the seed, and what the champion's confidence depends on."""
        drift = context.config.drift.model_dump(mode="json", exclude={"embedder"})
        return {"drift": drift, "seed": context.config.seed, **(model_key(context) if self.champion else {})}

    def run(self, context: RoundContext, out: Path, scratch: Path) -> dict[str, Any]:
        """Returns the values as the artifact's meta; it has no files."""
        config, seed = context.config.drift, context.config.seed
        today = [context.dataset(id).records for id in (self.pool, self.labelled)]
        before = [context.dataset(id).records for id in (self.known_pool, self.known_training)]
        # All inputs of the last round, not its training set alone: a batch is chosen to differ from the pool.
        known = _distinct(pa.concat_tables(before, promote_options="permissive"))
        new = _distinct(pa.concat_tables(today, promote_options="permissive"))
        new = new.filter(compute.invert(compute.is_in(new["input_id"], value_set=known["input_id"].combine_chunks())))
        values = DriftValues(new.num_rows, known.num_rows)
        if min(new.num_rows, known.num_rows) < config.least:
            return values.as_dict()
        samples = [sample_pool(table, config.compared, seed) for table in (known, new)]
        embeddings = [_embed(context, table) for table in samples]
        psi = cluster_drift(embeddings[0], embeddings[1], seed)
        squared, p_value = embedding_drift(embeddings[0], embeddings[1], seed)
        confidence = math.nan
        if self.champion is not None:
            scoring = scoring_for(context, self.champion)
            scored = [score_records(scoring, sample_pool(table, _MAX_SCORED, seed)) for table in samples]
            confidence = confidence_drift(*(table["confidence"].to_numpy() for table in scored))
        return DriftValues(values.new, values.known, psi, squared, p_value, confidence).as_dict()


def measure_drift(context: RoundContext, pool: str, labelled: str, champion: str) -> tuple[DriftValues, str]:
    """Measures the drift of today's inputs since the last finished round; returns it with the artifact's id.

    Args:
        context: The round that may start, or has started.
        pool: Id of the pool of today; ``labelled`` of the records of labelled files.
        champion: Id of the model in service.
    """
    last = finished_states(context.workspace)[-1]
    names = context.config.gate.names | context.config.triggers.names
    if context.config.tune is not None:
        names |= set(tuning_rule(context.config.tune).names)
    judge = champion if CONFIDENCE in names else None
    artifact = context.run(MeasureDrift(pool, labelled, last.id("pool"), last.id("next_parent"), judge))
    return DriftValues.from_dict(artifact.meta), artifact.id


def _distinct(records: pa.Table) -> pa.Table:
    """Returns the records, the first of each input."""
    _, first = np.unique(np.array(records["input_id"].to_pylist(), object), return_index=True)
    return records.take(pa.array(np.sort(first), pa.int64()))


def _embed(context: RoundContext, records: pa.Table) -> np.ndarray:
    name = context.config.drift.embedder
    if name is not None and head_embedder(name) is not None:
        return sentence_embeddings(context, name, records)
    rows = records.select(["prompt", "text"]).to_pylist()
    return hashed_ngrams(["\n".join(turn["content"] for turn in record_turns(row)) for row in rows])
