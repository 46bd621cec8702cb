"""Select: which pool records get a label, and why."""

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as compute
import pyarrow.parquet as parquet

from posttrain.evaluate.artifact import read_evaluation
from posttrain.evaluate.worst_classes import worst_classes
from posttrain.loop.stages.hard_cases import from_rows
from posttrain.loop.turn import Turn
from posttrain.select.auto import AUTO
from posttrain.select.batch import Weakness, choose, with_answers
from posttrain.select.informative import tells_errors
from posttrain.select.pool_map import pool_map
from posttrain.store.artifacts import Artifact

log = logging.getLogger("posttrain")

SCORES, HARD_CASES, LABELLED = "scores.parquet", "hard_cases.npy", "labelled.npy"
UNASKED = "unasked.parquet"  # what was only embedded, by the schema of the scores
ASKED_SINCE = "asked_since.parquet"  # what of it was chosen and asked then, by the same schema
LABELLED_SCORES = "labelled.parquet"  # of records that have a label: their loss and the like
BATCH, MAP, CASES = "batch.parquet", "map.parquet", "hard_cases.json"


def select(
    turn: Turn, champion: str, pool: Artifact, scores: Artifact, evaluation: str, n: int, cold: bool
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
        covers = cold or (auto and _is_uninformative(main.predictions))
        strategy, other = (one.cold_start if covers else str(one.strategy) for one in (chosen_by, covering))
        kappa = scores.meta["neighbours_kappa"] if strategy != other else None
        because = "" if kappa is None else f"neighbours hardly share labels (kappa {kappa:.2f})"
        if because:
            log.info("  %s: choosing by %s, not by %s", because, strategy, other)
        weakness = Weakness() if covers else _weakness(folder, worst_classes(main.per_class))
        table, labelled = parquet.read_table(folder / SCORES), _array(folder / LABELLED)
        unasked = parquet.read_table(folder / UNASKED) if (folder / UNASKED).exists() else None
        batch = choose(
            *(chosen_by, table, n, turn.seed("select")),
            unasked=unasked,
            weakness=weakness,
            labelled=labelled,
            cold=covers,
            because=because,
        )
        if not cold and batch["predicted"].null_count:
            asked = _asked_since(turn, champion, batch, turn.dataset(pool.id).records, scores)
            parquet.write_table(asked, out / ASKED_SINCE)
            batch = with_answers(batch, asked)
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


def _asked_since(turn: Turn, champion: str, batch: pa.Table, pool: pa.Table, scores: Artifact) -> pa.Table:
    """What the champion says of those records of a batch that it was not asked about before."""
    # Pages import this file, and need no model.
    from posttrain.loop.stages.costs import with_costs
    from posttrain.loop.stages.scoring import scoring_for
    from posttrain.select.score import score_records

    missing = batch.filter(compute.is_null(batch["predicted"]))["id"].combine_chunks()
    scoring = scoring_for(turn, champion, scores.meta.get("temperature", 1.0))
    records = pool.filter(compute.is_in(pool["id"], value_set=missing))
    return with_costs(score_records(scoring, records, turn.config.select), records, turn.config.select.cost)


def said_by_champion(scores: Path, selection: Path, columns: list[str] | None = None) -> pa.Table:
    """What the champion of a round said of records: the sample that it was asked about, and what was chosen beside it.

    Args:
        scores: folder of the round's scores.
        selection: folder of its selection.
        columns: of the score table; None for all.
    """
    files = [scores / SCORES] + ([selection / ASKED_SINCE] if (selection / ASKED_SINCE).exists() else [])
    return pa.concat_tables([parquet.read_table(file, columns=columns) for file in files])


def _is_uninformative(predictions: pa.Table) -> bool:
    """Whether the champion's confidence is known to be no guide to its errors, or next to nothing of it is right."""
    confidence = predictions["confidence"].to_numpy(zero_copy_only=False).astype(np.float64)
    score = predictions["score"].to_numpy()
    right_or_wrong = bool(np.isin(score, (0.0, 1.0)).all())
    right = score == 1 if right_or_wrong else score > np.median(score)
    found = not tells_errors(confidence, right)
    if found:
        log.info("  the champion's doubts do not tell where it errs yet: choosing as in a cold start")
    return found


def _weakness(folder: Path, worst: list[str]) -> Weakness:
    """What evaluation found weakest, from the scores' folder."""
    cases = folder / CASES
    named = from_rows(json.loads(cases.read_text(encoding="utf-8"))) if cases.exists() else []
    return Weakness(worst, _array(folder / HARD_CASES), named)


def _array(path: Path) -> np.ndarray | None:
    return np.load(path, allow_pickle=False) if path.exists() else None


def chosen_records(turn: Turn, selection: Artifact, pool: Artifact) -> tuple[pa.Table, list[str] | None]:
    """The batch as pool records, best first, and the champion's answers (None while it knows nothing)."""
    batch = parquet.read_table(turn.path(selection.id) / BATCH)
    records = turn.dataset(pool.id).records
    row_of = {id: row for row, id in enumerate(records["id"].to_pylist())}
    chosen = records.take([row_of[id] for id in batch["id"].to_pylist()])
    predicted = batch["predicted"].to_pylist()
    return chosen, None if None in predicted else predicted
