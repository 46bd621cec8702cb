"""Negatives: makes pairs of a copy of the round's training set, each label against that of the record's hard negative.

Each round makes them afresh; the next round builds on the training set without them. Of test records only the pairs of
labels that the champion confuses are used, never a text or an answer.
"""

import json
import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from posttrain.data.records.provenance import HARD_NEGATIVE
from posttrain.data.records.record import RECORD, assign_ids
from posttrain.data.versions.version import write_dataset
from posttrain.evaluate.suite import read_evaluation
from posttrain.loop.context import RoundContext, model_key
from posttrain.loop.history import finished_states
from posttrain.loop.record import RoundRecord, StageReport
from posttrain.loop.scoring import scoring_for
from posttrain.loop.stage import Stage
from posttrain.loop.stages.evaluate import Evaluate
from posttrain.loop.state import RoundState
from posttrain.report.section import Text
from posttrain.select.hard_negatives import Confusions, confused_labels, hard_negatives
from posttrain.select.scores.context import ScoringContext
from posttrain.select.scores.table import embed_records
from posttrain.store.message import Message

log = logging.getLogger("posttrain")

PAIRS = "pairs"
"""Name of the dataset versions that hold the pairs."""


@dataclass(frozen=True)
class HardNegativePairs(Stage):
    """Makes pairs of the training set's records.

    Args:
        dataset: Id of the round's training set.
        champion: Id of the model whose embeddings say what is near, and whose errors say what is confused.
        evaluation: Id of its evaluation; None while it has been trained on nothing, and its errors say nothing.
        scoring: The champion, and the sentence model where the config names one.
    """

    dataset: str
    champion: str
    evaluation: str | None
    scoring: ScoringContext
    name = "negatives"
    title = Message("hard negatives")
    kind = "dataset"
    seeded = False

    @classmethod
    def execute(cls, context: RoundContext) -> RoundState:
        """Makes the pairs, if the config asks for them."""
        state = context.state
        if not context.config.select.hard_negatives or state.dataset is None:
            # Those of an earlier attempt go, as the config has changed since.
            return state.without(cls.name)
        champion = state.id("champion")
        cold = champion == finished_states(context.workspace)[0].candidate
        evaluation = None if cold else context.run(Evaluate(champion, state.id("test"))).id
        artifact = context.run(cls(state.dataset, champion, evaluation, scoring_for(context, champion)))
        if not context.workspace.metadata.arm:
            context.workspace.metadata.name_artifact(PAIRS, artifact.id, state.dataset)
        counts = artifact.meta[HARD_NEGATIVE]
        log.info("  %d pairs, %d of them of labels that the champion confuses", counts["pairs"], counts["confused"])
        return state.with_output(cls.name, artifact.id)

    @classmethod
    def report(cls, record: RoundRecord) -> StageReport:
        """Reports the pairs."""
        artifact = record.artifact(record.state.outputs.get(cls.name))
        counts = artifact.meta[HARD_NEGATIVE] if artifact else None
        template = "{pairs} pairs of hard negatives, {confused} of them of labels that the champion confuses"
        blocks = [Text(Message(template, **counts), "sentence")] if counts else ()
        return StageReport({"hard_negatives": counts}, blocks=blocks)

    def inputs(self, context: RoundContext) -> dict[str, str]:
        """Returns the training set, the champion with its evaluation, and the sentence model."""
        inputs = {"dataset": self.dataset, "champion": self.champion}
        inputs |= {"sentence model": self.scoring.sentences.id} if self.scoring.sentences else {}
        return inputs | ({"evaluation": self.evaluation} if self.evaluation else {})

    def settings(self, context: RoundContext) -> dict[str, Any]:
        """Returns the task."""
        return model_key(context)

    def run(self, context: RoundContext, out: Path, scratch: Path) -> dict[str, Any]:
        """Writes the training set as pairs."""
        records, labels = context.dataset(self.dataset).records, context.config.task.label_set
        confusions: Confusions = {}
        if self.evaluation is not None:
            main = next(iter(read_evaluation(context.path(self.evaluation)).values()))
            confusions = confused_labels(main.predictions, labels)
        pairs = pair_records(records, embed_records(self.scoring, records), labels, confusions)
        counts = pair_counts(pairs)
        meta = {"name": PAIRS, "parent": self.dataset, "increment": {}, "filters": [self.name], HARD_NEGATIVE: counts}
        steps = (("read", "in"), ("kept", "kept"))
        funnel = [{"step": step, "reason": reason, "count": records.num_rows} for step, reason in steps]
        return write_dataset(out, pairs, meta={**meta, "funnel": funnel})


def pair_records(records: pa.Table, embeddings: Any, labels: Sequence[str], confusions: Confusions) -> pa.Table:
    """Returns the records as pairs: the label is chosen, that of the hard negative is rejected.

    ``meta`` says in ``hard_negative`` which record that is, how similar (null where there is none, as all records have
    one label: then another label of the set is rejected), and whether the labels are confused. A record that has a
    rejected answer already stays as it is.

    Args:
        records: RECORD table with answers.
        embeddings: float [N, D], of the records.
        labels: the closed label set, of two labels or more.
        confusions: the pairs of labels that the model confuses.
    """
    answers, ids = records["completion"].to_pylist(), records["id"].to_pylist()
    negatives = hard_negatives(embeddings, answers, confusions)
    rejected, metas = records["rejected"].to_pylist(), records["meta"].to_pylist()
    for row, negative in enumerate(negatives.rows.tolist()):
        if rejected[row] is not None:
            continue
        mark: dict[str, Any] = {"of": None, "similarity": None, "confused": bool(negatives.is_confused[row])}
        if negative >= 0:
            mark |= {"of": ids[negative], "similarity": round(float(negatives.similarity[row]), 4)}
            rejected[row] = answers[negative]
        else:
            rejected[row] = next(label for label in labels if label != answers[row])
        metas[row] = json.dumps({**json.loads(metas[row] or "{}"), HARD_NEGATIVE: mark}, sort_keys=True)
    for name, values in (("rejected", rejected), ("meta", metas)):
        records = records.set_column(RECORD.get_field_index(name), name, pa.array(values, pa.string()))
    return assign_ids(records)


def pair_counts(pairs: pa.Table) -> dict[str, int]:
    """Counts pairs of `pair_records`: all (``pairs``), and those of ``confused`` labels."""
    marks = [json.loads(meta or "{}").get(HARD_NEGATIVE) or {} for meta in pairs["meta"].to_pylist()]
    return {"pairs": pairs.num_rows, "confused": Counter(mark.get("confused") for mark in marks)[True]}
