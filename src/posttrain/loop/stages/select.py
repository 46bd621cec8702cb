"""Select: which pool records get a label, and why."""

import json
import logging
from dataclasses import asdict
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
from posttrain.loop.history import candidate_results, carried_dataset, finished_rounds
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
from posttrain.select.batch import choose_batch, with_predictions
from posttrain.select.hard_cases import FocusTargets
from posttrain.select.pool_map import pool_map
from posttrain.select.stopping import GainEstimate, cohen_kappa, estimate_gain, expected_gain
from posttrain.select.strategy import AUTO, confidence_predicts_errors
from posttrain.store.artifacts import Artifact
from posttrain.store.errors import DamagedArtifactError

log = logging.getLogger("posttrain")


def select(
    turn: RoundContext, champion: str, pool: Artifact, scores: Artifact, evaluation: str, n: int, cold: bool
) -> Artifact:
    """The batch to label, each record with the reason for which it was chosen.

    The champion is asked what it was not asked before and is chosen now.
    """
    has_labels = bool(turn.config.task.label_set)
    chosen_by = turn.config.select.of_round(turn.number, has_labels, scores.meta.get("neighbours_share", True))
    covering = turn.config.select.of_round(turn.number, has_labels)
    auto = turn.config.select.strategy == AUTO

    def work(out: Path, scratch: Path) -> dict[str, Any]:
        folder = turn.path(scores.id)
        main = next(iter(read_evaluation(turn.path(evaluation)).values()))
        covers = cold or (auto and _confidence_is_uninformative(main.predictions))
        strategy, other = (one.cold_start if covers else str(one.strategy) for one in (chosen_by, covering))
        kappa = scores.meta["neighbours_kappa"] if strategy != other else None
        because = "" if kappa is None else f"neighbours hardly share labels (kappa {kappa:.2f})"
        if because:
            log.info("  %s: choosing by %s, not by %s", because, strategy, other)
        weakness = FocusTargets() if covers else _focus_targets(folder, worst_classes(main.per_class))
        table, labelled = parquet.read_table(folder / SCORES), load_array(folder / LABELLED)
        unasked = parquet.read_table(folder / UNSCORED) if (folder / UNSCORED).exists() else None
        batch = choose_batch(
            *(chosen_by, table, n, turn.seed("select")),
            unasked=unasked,
            weakness=weakness,
            labelled=labelled,
            cold=covers,
            because=because,
        )
        if not cold and batch["predicted"].null_count:
            asked = _score_selected(turn, champion, batch, turn.dataset(pool.id).records, scores)
            parquet.write_table(asked, out / SCORED_LATER)
            batch = with_predictions(batch, asked)
        parquet.write_table(batch, out / BATCH)
        everything = table if unasked is None else pa.concat_tables([table, unasked])
        parquet.write_table(pool_map(everything, batch, labelled, turn.seed("select")), out / MAP)
        reasons = compute.value_counts(batch["reason"]).to_pylist()
        return {
            "records": batch.num_rows,
            "reasons": {entry["values"]: entry["counts"] for entry in reasons},
            "worst_classes": list(weakness.classes),
            "strategy": strategy,
            **({} if kappa is None else {"unshared": kappa}),
        }

    settings = {"select": chosen_by.model_dump(mode="json", exclude={"stop"}), "n": n, "auto": auto}
    inputs = {"scores": scores.id, "evaluation": evaluation}
    return turn.stage("select", "selection", inputs, settings, work, version=5)


def _score_selected(turn: RoundContext, champion: str, batch: pa.Table, pool: pa.Table, scores: Artifact) -> pa.Table:
    """What the champion says of those records of a batch that it was not asked about before."""
    # Pages import this file, and need no model.
    from posttrain.loop.scoring import add_cost_column, scoring_for
    from posttrain.select.scores.table import score_records

    missing = batch.filter(compute.is_null(batch["predicted"]))["id"].combine_chunks()
    scoring = scoring_for(turn, champion, scores.meta.get("temperature", 1.0))
    records = pool.filter(compute.is_in(pool["id"], value_set=missing))
    return add_cost_column(score_records(scoring, records, turn.config.select), records, turn.config.select.cost)


def _confidence_is_uninformative(predictions: pa.Table) -> bool:
    """Whether the champion's confidence is known to be no guide to its errors, or next to nothing of it is right."""
    confidence = predictions["confidence"].to_numpy(zero_copy_only=False).astype(np.float64)
    score = predictions["score"].to_numpy()
    right_or_wrong = bool(np.isin(score, (0.0, 1.0)).all())
    right = score == 1 if right_or_wrong else score > np.median(score)
    found = not confidence_predicts_errors(confidence, right)
    if found:
        log.info("  the champion's doubts do not tell where it errs yet: choosing as in a cold start")
    return found


def _focus_targets(folder: Path, worst: list[str]) -> FocusTargets:
    """What evaluation found weakest, from the scores' folder."""
    cases = folder / CASES
    named = cases_from_rows(json.loads(cases.read_text(encoding="utf-8"))) if cases.exists() else []
    return FocusTargets(worst, load_array(folder / HARD_CASES), named)


def batch_size(turn: RoundContext) -> int:
    """Labels to ask for in this round: the config's, as far as its budget goes."""
    config = turn.config.label
    asked = sum(entry.detail.get("labels_new", 0) for entry in finished_rounds(turn.workspace))
    return config.per_round if config.budget is None else max(0, min(config.per_round, config.budget - asked))


def estimate_batch_gain(turn: RoundContext, champion: str, scores: Artifact, labels: int) -> GainEstimate | None:
    """What a batch of so many labels is expected to bring; None where the rounds before cannot be read.

    Args:
        turn: the round that is about to ask.
        champion: id of the model that its candidate has to beat.
        scores: the pool as the champion scores it now.
        labels: in the batch.
    """
    try:
        so_far = candidate_results(turn.workspace)
        main = next(iter(read_evaluation(turn.path(so_far[-1].evaluation)).values()))
        learned = [one.labels for one in so_far]
        values = [one.value for one in so_far]
        carried = turn.workspace.artifacts.get(carried_dataset(turn.workspace)).meta["counts"]["records"]
        expected = expected_gain(
            learned, values, len(main.predictions), carried + labels, _taught(turn, champion, carried)
        )
        shares = all(0 <= value <= 1 for value in values)
        unknown = "" if shares else f"{main.paired} is no share from 0 to 1, of which a learning curve could be drawn"
        return estimate_gain(
            turn.config.select.stop, main.paired, labels, expected, _agreements(turn, champion, scores), unknown
        )
    except DamagedArtifactError as error:
        log.warning("%s; what further labels will bring cannot be estimated", error)
        return None


def gain_detail(found: GainEstimate) -> dict[str, Any]:
    """An outlook as a round's row keeps it."""
    one = found.expected
    gain = {"metric": found.metric, **asdict(one)} if one else None
    return {
        "labels": found.labels,
        "expected_gain": gain,
        "unknown": found.unknown or None,
        "agreements": list(found.agreements),
        "why_stop": found.why,
    }


def _taught(turn: RoundContext, champion: str, carried: int) -> int:
    """Labels that the champion has learned from; ``carried`` where it is of no round."""
    learned = {entry.candidate: int(entry.detail["labels"]) for entry in finished_rounds(turn.workspace)}
    return learned.get(champion, carried)


def _agreements(turn: RoundContext, champion: str, scores: Artifact) -> list[float]:
    """Cohen's kappa of successive champions on pool records that both scored, oldest first.

    Where a round's candidate was refused, the next one's scores are of the same model, and tell nothing new.
    """
    scored = [
        (entry.champion_before, str(entry.detail["scores"]))
        for entry in finished_rounds(turn.workspace)
        if "scores" in entry.detail
    ]
    found = []
    before: dict[str, str] = {}
    for _, same in groupby([*scored, (champion, scores.id)], key=itemgetter(0)):
        *_, (_, id) = same  # the latest of each champion
        table = parquet.read_table(turn.path(id) / SCORES, columns=["id", "predicted"])
        now = {key: answer for key, answer in zip(*table.to_pydict().values(), strict=True) if answer is not None}
        agreed = cohen_kappa(before, now)
        found += [] if agreed is None else [agreed]
        before = now
    return found
