"""Select: selects the pool records to label, and notes the reason for each."""

import json
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as compute
import pyarrow.parquet as parquet

from posttrain.evaluate.metrics import worst_classes
from posttrain.evaluate.suite import read_evaluation
from posttrain.loop.context import RoundContext
from posttrain.loop.gain import STAGE, current_estimate, estimate_batch_gain, gain_sentence, gain_to_json
from posttrain.loop.history import finished_states
from posttrain.loop.model_registry import ModelRegistry
from posttrain.loop.record import LoopRecord, RoundRecord, StageReport
from posttrain.loop.score_files import (
    ASKED_SINCE,
    BATCH,
    CASES,
    HARD_CASES,
    HARD_RECORDS,
    LABELLED,
    MAP,
    SCORES,
    UNSCORED,
    cases_from_rows,
    load_array,
)
from posttrain.loop.selection_report import selection_section
from posttrain.loop.selections import read_selections
from posttrain.loop.stage import Stage
from posttrain.loop.stages.evaluate import Evaluate
from posttrain.loop.state import RoundState
from posttrain.report.formatting import reason_text
from posttrain.report.section import Section, Text, blocks
from posttrain.select.batch import choose_batch, with_predictions
from posttrain.select.hard_cases import FocusTargets
from posttrain.select.pool_map import pool_map
from posttrain.select.strategy import AUTO, confidence_predicts_errors
from posttrain.store.artifacts import Artifact
from posttrain.store.message import Message

log = logging.getLogger("posttrain")


@dataclass(frozen=True)
class Select(Stage):
    """Selects the batch to label, each record with the reason for its selection.

    Records of the batch that the champion has not scored yet are scored after the selection.

    Args:
        champion: Id of the model.
        pool: Id of the pool.
        scores: Scores of the pool.
        evaluation: Id of the champion's evaluation.
        n: Number of records in the batch.
        cold: As in `posttrain.loop.stages.score.Score`.
    """

    champion: str
    pool: str
    scores: Artifact
    evaluation: str
    n: int
    cold: bool
    name = STAGE
    title = Message("select")
    kind = "selection"
    version = 6

    @classmethod
    def execute(cls, context: RoundContext) -> RoundState:
        """Selects the batch, unless one is out already or there is a reason to label no more."""
        state = context.state
        # `Score` keeps it only for a batch that is out to be labelled.
        if state.selection is not None:
            return state
        champion = state.id("champion")
        n = batch_size(context)
        if not context.config.label.per_round:
            what = Message("new labels, as label.per_round is 0 (posttrain data add FILE --to labelled)")
            return _nothing_to_label(context, what)
        if not n:
            budget = context.config.label.budget
            what = Message("a larger label.budget: all {budget} labels are used up", budget=budget)
            return _nothing_to_label(context, what)
        scores = context.artifact(state.id("scores"))
        evaluation = context.run(Evaluate(champion, state.id("test")))
        selection = context.run(cls(champion, state.id("pool"), scores, evaluation.id, n, scores.meta["cold"]))
        if not selection.meta["records"]:
            if not context.config.data.pool:
                what = Message(
                    "new inputs or labels: there is no pool, and all labels are used (posttrain data add FILE)"
                )
                return _nothing_to_label(context, what)
            what = Message("new inputs: every record of the pool is labelled (posttrain data add FILE)")
            return _nothing_to_label(context, what)
        wanted, strategy = context.config.select.strategy, selection.meta["strategy"]
        if wanted not in (AUTO, strategy):
            log.info("  chosen by %s: %s needs a champion that a round has trained", strategy, wanted)
        gain = estimate_batch_gain(context, champion, scores, selection.meta["records"])
        estimate = gain_to_json(gain) if gain else None
        if gain is not None:
            log.info("  %s", gain.sentence)
            if gain.why:
                log.info("  more labels no longer pay off: %s", gain.why)
                if context.config.select.stop.action == "stop":
                    reason = Message("a reason to label more: {why} (select.stop)", why=gain.why)
                    return _nothing_to_label(context, reason).with_result(cls.name, estimate)
        return context.update(selection=selection.id).with_result(cls.name, estimate)

    @classmethod
    def report(cls, record: RoundRecord) -> StageReport:
        """Reports why records were selected, and what the batch is expected to bring while the round is open."""
        champion = ModelRegistry(record.workspace).champion
        estimate = current_estimate(record.state, champion.model_id if champion else None)
        forecast = gain_sentence(estimate) if estimate else None
        selection = record.artifact(record.state.selection)
        reasons = selection.meta["reasons"] if selection else {}
        counted = [Message("{count} {reason}", count=n, reason=reason_text(name)) for name, n in reasons.items()]
        selected = Message("selected: {reasons}", reasons=Message.joined(", ", counted)) if counted else ""
        latest = [forecast] if forecast and not record.is_done else ()
        return StageReport({"forecast": forecast}, latest=latest, blocks=blocks(Text(selected, "sentence")))

    @classmethod
    def sections(cls, loop: LoopRecord) -> Iterator[Section]:
        """Yields the batches, the latest in full."""
        yield selection_section(read_selections(loop), loop.detail)

    def inputs(self, context: RoundContext) -> dict[str, str]:
        """Returns the scores and the champion's evaluation."""
        return {"scores": self.scores.id, "evaluation": self.evaluation}

    def settings(self, context: RoundContext) -> dict[str, Any]:
        """Returns the config section and the size of the batch."""
        # Without `stop`: the estimate is made after the batch and changes none.
        return {
            "select": context.config.select.model_dump(mode="json", exclude={"stop", "hard_negatives"}),
            "n": self.n,
        }

    def run(self, context: RoundContext, out: Path, scratch: Path) -> dict[str, Any]:
        """Writes the batch and a map of the pool."""
        folder, config = context.path(self.scores.id), context.config.select
        main = next(iter(read_evaluation(context.path(self.evaluation)).values()))
        strategy = config.batch_strategy(
            cold=self.cold,
            has_labels=bool(context.config.task.label_set),
            predicts_errors=self.cold or config.strategy != AUTO or _predicts_errors(main.predictions),
            neighbours_share_labels=self.scores.meta.get("neighbours_share", True),
        )
        unshared = None if self.scores.meta.get("neighbours_share", True) else self.scores.meta["neighbours_kappa"]
        random_reason = "" if unshared is None else f"neighbours hardly share labels (kappa {unshared:.2f})"
        if random_reason:
            log.info("  %s: choosing by %s, as covering the pool gains little", random_reason, strategy.name)
        focus = FocusTargets() if strategy.cold else _focus_targets(folder, worst_classes(main.per_class))
        table, labelled = parquet.read_table(folder / SCORES), load_array(folder / LABELLED)
        unscored = parquet.read_table(folder / UNSCORED) if (folder / UNSCORED).exists() else None
        batch = choose_batch(
            config,
            strategy,
            table,
            self.n,
            context.seed("select"),
            unscored=unscored,
            targets=focus,
            labelled=labelled,
            random_reason=random_reason,
        )
        if not self.cold and batch["predicted"].null_count:
            scored = _score_selected(context, self.champion, batch, context.dataset(self.pool).records, self.scores)
            parquet.write_table(scored, out / ASKED_SINCE)
            batch = with_predictions(batch, scored)
        parquet.write_table(batch, out / BATCH)
        embedded = table if unscored is None else pa.concat_tables([table, unscored])
        parquet.write_table(pool_map(embedded, batch, labelled, context.seed("select")), out / MAP)
        reasons = compute.value_counts(batch["reason"]).to_pylist()
        return {
            "records": batch.num_rows,
            "reasons": {entry["values"]: entry["counts"] for entry in reasons},
            "worst_classes": list(focus.classes),
            "strategy": strategy.name,
            "options": dict(strategy.options),
            **({} if unshared is None else {"unshared": unshared}),
        }


def _nothing_to_label(context: RoundContext, reason: str) -> RoundState:
    # Without a batch in the state, or the next run would take it for one that is out.
    return context.update(nothing_to_label=reason, queried_pool=None, scores=None, selection=None)


def _score_selected(
    context: RoundContext, champion: str, batch: pa.Table, pool: pa.Table, scores: Artifact
) -> pa.Table:
    """Scores those records of a batch that were only embedded before."""
    # Here and not at the top: the verbs that only read selections import this module, and need no model.
    from posttrain.loop.scoring import scoring_for
    from posttrain.select.scores.table import score_records

    missing = batch.filter(compute.is_null(batch["predicted"]))["id"].combine_chunks()
    scoring = scoring_for(context, champion, scores.meta.get("temperature", 1.0))
    records = pool.filter(compute.is_in(pool["id"], value_set=missing))
    return score_records(scoring, records, context.config.select.wanted_scores())


def _predicts_errors(predictions: pa.Table) -> bool:
    """Returns False if the champion's confidence does not predict its errors, or almost no answer is right."""
    confidence = predictions["confidence"].to_numpy(zero_copy_only=False).astype(np.float64)
    score = predictions["score"].to_numpy()
    right_or_wrong = bool(np.isin(score, (0.0, 1.0)).all())
    # Graded scores, such as token F1, are rarely 1: the better half counts as right.
    right = score == 1 if right_or_wrong else score > np.median(score)
    predicts = confidence_predicts_errors(confidence, right)
    if not predicts:
        log.info("  the champion's confidence does not predict its errors yet: choosing as in a cold start")
    return predicts


def _focus_targets(folder: Path, worst: list[str]) -> FocusTargets:
    """Builds the targets: the weakest classes, and the hard cases of the scores' folder."""
    file = folder / CASES
    cases = cases_from_rows(json.loads(file.read_text(encoding="utf-8"))) if file.exists() else []
    file = folder / HARD_RECORDS
    records = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    return FocusTargets(worst, load_array(folder / HARD_CASES), cases, records)


def batch_size(context: RoundContext) -> int:
    """Returns the number of labels to request in this round: the config's, as far as its budget goes."""
    config = context.config.label
    states = finished_states(context.workspace)
    labels = sum((state.labels_new or 0) - _labels_by_models(context, state) for state in states)
    return config.per_round if config.budget is None else max(0, min(config.per_round, config.budget - labels))


def _labels_by_models(context: RoundContext, state: RoundState) -> int:
    """Returns the number of a round's labels that models gave: those cost no budget."""
    row = context.workspace.metadata.artifact(state.labelled or "")
    counts = row.meta.get("annotators", {}) if row else {}
    return sum(count for name, count in counts.items() if name.startswith("model:"))
