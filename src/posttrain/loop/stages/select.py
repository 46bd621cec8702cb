"""Select: selects the pool records to label, and records the reason for each."""

import json
import logging
from dataclasses import asdict, dataclass
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as compute
import pyarrow.parquet as parquet

from posttrain.evaluate.metrics import worst_classes
from posttrain.evaluate.suite import read_evaluation
from posttrain.loop.context import RoundContext
from posttrain.loop.history import candidate_results, carried_dataset, finished_states
from posttrain.loop.score_files import (
    BATCH,
    CASES,
    HARD_CASES,
    LABELLED,
    MAP,
    SCORED_LATER,
    SCORES,
    UNSCORED,
    cases_from_rows,
    load_array,
)
from posttrain.loop.stage import Stage
from posttrain.loop.stages.evaluate import Evaluate
from posttrain.loop.state import RoundState
from posttrain.select.batch import choose_batch, with_predictions
from posttrain.select.config import SelectConfig
from posttrain.select.hard_cases import FocusTargets
from posttrain.select.pool_map import pool_map
from posttrain.select.stopping import GainEstimate, cohen_kappa, estimate_gain, expected_gain
from posttrain.select.strategy import AUTO, confidence_predicts_errors
from posttrain.store.artifacts import Artifact
from posttrain.store.errors import DamagedArtifactError

log = logging.getLogger("posttrain")


@dataclass(frozen=True)
class Select(Stage):
    """Selects the batch to label, each record with the reason for its selection.

    Records of the batch that the champion has not scored yet are scored after the selection.

    Args:
        champion: id of the model.
        pool: id of the pool.
        scores: the pool's scores.
        evaluation: id of the champion's.
        n: records in the batch.
        cold: as in `posttrain.loop.stages.score.Score`.
    """

    champion: str
    pool: str
    scores: Artifact
    evaluation: str
    n: int
    cold: bool
    name = "select"
    kind = "selection"
    version = 5

    @classmethod
    def execute(cls, context: RoundContext) -> RoundState:
        """Select the batch, unless one is out already or there is a reason to label no more."""
        state = context.state
        # `Score` keeps it only for a batch that is out to be labelled.
        if state.selection is not None:
            return state
        champion = state.id("champion")
        n = batch_size(context)
        if not n:
            budget = context.config.label.budget
            return _nothing_to_label(context, f"a larger label.budget: all {budget} labels have been given")
        scores = context.artifact(state.id("scores"))
        evaluation = context.run(Evaluate(champion, state.id("test")))
        selection = context.run(cls(champion, state.id("pool"), scores, evaluation.id, n, scores.meta["cold"]))
        if not selection.meta["records"]:
            return _nothing_to_label(
                context, "new inputs: every record of the pool is labelled (posttrain data add FILE)"
            )
        gain = estimate_batch_gain(context, champion, scores, selection.meta["records"])
        outlook = gain_detail(gain) if gain else None
        if gain is not None:
            log.info("  %s", gain.sentence)
            if gain.why:
                log.info("  labelling more has stopped to pay: %s", gain.why)
                if context.config.select.stop.action == "stop":
                    reason = f"a reason to label more: {gain.why} (select.stop)"
                    return _nothing_to_label(context.with_state(outlook=outlook), reason)
        return context.update(selection=selection.id, outlook=outlook)

    def inputs(self, context: RoundContext) -> dict[str, str]:
        """The scores and the champion's evaluation."""
        return {"scores": self.scores.id, "evaluation": self.evaluation}

    def settings(self, context: RoundContext) -> dict[str, Any]:
        """The strategy of this round with its options."""
        # Without `stop`: the estimate is made after the batch and changes none.
        config = self._config(context)
        auto = context.config.select.strategy == AUTO
        return {"select": config.model_dump(mode="json", exclude={"stop"}), "n": self.n, "auto": auto}

    def run(self, context: RoundContext, out: Path, scratch: Path) -> dict[str, Any]:
        """Write the batch and a map of the pool."""
        folder, config = context.path(self.scores.id), self._config(context)
        covering = context.config.select.of_round(context.number, bool(context.config.task.label_set))
        main = next(iter(read_evaluation(context.path(self.evaluation)).values()))
        auto = context.config.select.strategy == AUTO
        covers = self.cold or (auto and _confidence_is_uninformative(main.predictions))
        strategy, other = (each.cold_start if covers else str(each.strategy) for each in (config, covering))
        kappa = self.scores.meta["neighbours_kappa"] if strategy != other else None
        because = "" if kappa is None else f"neighbours hardly share labels (kappa {kappa:.2f})"
        if because:
            log.info("  %s: choosing by %s, not by %s", because, strategy, other)
        focus = FocusTargets() if covers else _focus_targets(folder, worst_classes(main.per_class))
        table, labelled = parquet.read_table(folder / SCORES), load_array(folder / LABELLED)
        unscored = parquet.read_table(folder / UNSCORED) if (folder / UNSCORED).exists() else None
        batch = choose_batch(
            *(config, table, self.n, context.seed("select")),
            unscored=unscored,
            targets=focus,
            labelled=labelled,
            cold=covers,
            because=because,
        )
        if not self.cold and batch["predicted"].null_count:
            scored = _score_selected(context, self.champion, batch, context.dataset(self.pool).records, self.scores)
            parquet.write_table(scored, out / SCORED_LATER)
            batch = with_predictions(batch, scored)
        parquet.write_table(batch, out / BATCH)
        embedded = table if unscored is None else pa.concat_tables([table, unscored])
        parquet.write_table(pool_map(embedded, batch, labelled, context.seed("select")), out / MAP)
        reasons = compute.value_counts(batch["reason"]).to_pylist()
        return {
            "records": batch.num_rows,
            "reasons": {entry["values"]: entry["counts"] for entry in reasons},
            "worst_classes": list(focus.classes),
            "strategy": strategy,
            **({} if kappa is None else {"unshared": kappa}),
        }

    def _config(self, context: RoundContext) -> SelectConfig:
        """The select section as it holds in this round."""
        shared = self.scores.meta.get("neighbours_share", True)
        return context.config.select.of_round(context.number, bool(context.config.task.label_set), shared)


def _nothing_to_label(context: RoundContext, reason: str) -> RoundState:
    # Without a batch in the state, or the next run would take it for one that is out.
    return context.update(nothing_to_label=reason, asked=None, scores=None, selection=None)


def _score_selected(
    context: RoundContext, champion: str, batch: pa.Table, pool: pa.Table, scores: Artifact
) -> pa.Table:
    """Score those records of a batch that were only embedded before."""
    # Here and not at the top: the verbs that only read selections import this module, and need no model.
    from posttrain.loop.costs import add_cost_column
    from posttrain.loop.scoring import scoring_for
    from posttrain.select.scores.table import score_records

    missing = batch.filter(compute.is_null(batch["predicted"]))["id"].combine_chunks()
    scoring = scoring_for(context, champion, scores.meta.get("temperature", 1.0))
    records = pool.filter(compute.is_in(pool["id"], value_set=missing))
    select = context.config.select
    return add_cost_column(score_records(scoring, records, select.wanted_scores()), records, select.cost)


def _confidence_is_uninformative(predictions: pa.Table) -> bool:
    """True if the champion's confidence is known not to predict its errors, or almost no answer is right."""
    confidence = predictions["confidence"].to_numpy(zero_copy_only=False).astype(np.float64)
    score = predictions["score"].to_numpy()
    right_or_wrong = bool(np.isin(score, (0.0, 1.0)).all())
    # Graded scores, such as token F1, are rarely 1: the better half counts as right.
    right = score == 1 if right_or_wrong else score > np.median(score)
    uninformative = not confidence_predicts_errors(confidence, right)
    if uninformative:
        log.info("  the champion's confidence does not predict its errors yet: choosing as in a cold start")
    return uninformative


def _focus_targets(folder: Path, worst: list[str]) -> FocusTargets:
    """Read what evaluation found weakest from the scores' folder."""
    cases = folder / CASES
    named = cases_from_rows(json.loads(cases.read_text(encoding="utf-8"))) if cases.exists() else []
    return FocusTargets(worst, load_array(folder / HARD_CASES), named)


def batch_size(context: RoundContext) -> int:
    """The number of labels to request in this round: the config's, as far as its budget goes."""
    config = context.config.label
    given = sum(state.labels_new or 0 for state in finished_states(context.workspace))
    return config.per_round if config.budget is None else max(0, min(config.per_round, config.budget - given))


def estimate_batch_gain(context: RoundContext, champion: str, scores: Artifact, labels: int) -> GainEstimate | None:
    """Estimate the gain of a batch of so many labels; None if an earlier round cannot be read.

    Args:
        context: the round that is about to request labels.
        champion: id of the model that its candidate has to beat.
        scores: the pool as the champion scores it now.
        labels: in the batch.
    """
    try:
        so_far = candidate_results(context.workspace)
        main = next(iter(read_evaluation(context.path(so_far[-1].evaluation)).values()))
        learned = [result.labels for result in so_far]
        values = [result.value for result in so_far]
        carried = context.workspace.artifacts.get(carried_dataset(context.workspace)).meta["counts"]["records"]
        expected = expected_gain(
            learned, values, len(main.predictions), carried + labels, _labels_learned(context, champion, carried)
        )
        shares = all(0 <= value <= 1 for value in values)
        unknown = "" if shares else f"{main.paired} is no share from 0 to 1, of which a learning curve could be drawn"
        return estimate_gain(
            context.config.select.stop, main.paired, labels, expected, _agreements(context, champion, scores), unknown
        )
    # An estimate is advice: a damaged artifact of an earlier round must not end this one.
    except DamagedArtifactError as error:
        log.warning("%s; the gain of further labels cannot be estimated", error)
        return None


def gain_detail(estimate: GainEstimate) -> dict[str, Any]:
    """Convert an estimate to the JSON values that a round's row stores."""
    expected = estimate.expected
    gain = {"metric": estimate.metric, **asdict(expected)} if expected else None
    return {
        "labels": estimate.labels,
        "expected_gain": gain,
        "unknown": estimate.unknown or None,
        "agreements": list(estimate.agreements),
        "why_stop": estimate.why,
    }


def _labels_learned(context: RoundContext, champion: str, carried: int) -> int:
    """The number of labels that the champion was trained on; ``carried`` if no round trained it."""
    labels = {state.candidate: state.labels for state in finished_states(context.workspace)}
    return labels.get(champion) or carried


def _agreements(context: RoundContext, champion: str, scores: Artifact) -> list[float]:
    """Cohen's kappa of successive champions on pool records that both scored, oldest first."""
    scored = [(state.champion, state.scores) for state in finished_states(context.workspace) if state.scores]
    kappas: list[float] = []
    before: dict[str, str] = {}
    # Grouped by champion: after a refused candidate the next round's scores are of the same model and say nothing new.
    for _, same in groupby([*scored, (champion, scores.id)], key=itemgetter(0)):
        *_, (_, id) = same  # the latest of each champion
        table = parquet.read_table(context.path(id) / SCORES, columns=["id", "predicted"])
        now = {key: answer for key, answer in zip(*table.to_pydict().values(), strict=True) if answer is not None}
        kappa = cohen_kappa(before, now)
        kappas += [] if kappa is None else [kappa]
        before = now
    return kappas
