"""Score and select: which pool records get a label."""

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as compute
import pyarrow.parquet as parquet

from posttrain.evaluate.artifact import read_evaluation
from posttrain.evaluate.worst_classes import worst_classes
from posttrain.loop.stages.hard_cases import as_rows, from_rows, hard_test_cases, others_evaluated
from posttrain.loop.stages.scoring import calibrated, forget_others, scoring_for, scoring_inputs, scoring_settings
from posttrain.loop.turn import Turn, task_key
from posttrain.select.auto import AUTO
from posttrain.select.batch import Weakness, choose
from posttrain.select.informative import informative
from posttrain.select.pool_map import pool_map
from posttrain.select.score import embed_records, sample_note, score_labelled, score_pool
from posttrain.select.scores.names import SCORES as SCORE_NAMES
from posttrain.store.artifacts import Artifact

SCORES, HARD_CASES, LABELLED, BATCH = "scores.parquet", "hard_cases.npy", "labelled.npy", "batch.parquet"
log = logging.getLogger("posttrain")

LABELLED_SCORES = "labelled.parquet"  # of records that have a label: their loss and the like
MAP, CASES = "map.parquet", "hard_cases.json"


def free_records(pool: pa.Table, train: pa.Table) -> pa.Table:
    """The pool's records that the training set does not hold yet, and that differ from each other."""
    taken = pa.array(train["input_id"].to_pylist(), pa.string())
    return pool.filter(compute.invert(compute.is_in(pool["input_id"], value_set=taken)))


def score(
    turn: Turn, champion: str, pool: Artifact, train: str, test: Artifact, evaluation: str, cold: bool
) -> Artifact:
    """How unsure the champion is of the pool, and where its hard test cases lie."""
    others = {} if cold else others_evaluated(turn, champion, test)
    select = turn.config.select
    names = [] if cold else select.wanted_scores()
    scoring = scoring_for(turn, champion)

    def work(out: Path, scratch: Path) -> dict[str, Any]:
        learned, measured = turn.dataset(train).records, turn.dataset(test.id).records
        free = free_records(turn.dataset(pool.id).records, learned)
        forget_others(turn, scoring)
        fitted = {} if cold else calibrated(scoring, measured)
        scaled = replace(scoring, temperature=fitted.get("temperature", 1.0))
        scores = score_pool(scaled, free, turn.config.task.label_set, select, turn.seed("score"), cold=cold)
        parquet.write_table(scores, out / SCORES)
        if learned.num_rows:
            np.save(out / LABELLED, embed_records(scoring.model, learned, scoring.cache), allow_pickle=False)
            if of_answers := [name for name in names if SCORE_NAMES[name].of == "labelled"]:
                parquet.write_table(score_labelled(scoring, learned, of_answers), out / LABELLED_SCORES)
        if not cold:
            cases, hard = hard_test_cases(turn, evaluation, others, measured)
            (out / CASES).write_text(json.dumps(as_rows(cases), ensure_ascii=False, indent=1), encoding="utf-8")
            np.save(out / HARD_CASES, embed_records(scoring.model, hard, scoring.cache), allow_pickle=False)
        return {**sample_note(scores), "cold": cold, **fitted}

    inputs = {"champion": champion, "pool": pool.id, "train": train, "evaluation": evaluation, **others}
    inputs |= {} if cold else {"test": test.id, **scoring_inputs(scoring, names)}
    kinds = {} if cold else {"hard_cases": select.hard_cases}
    settings = scoring_settings(turn, cold=cold)
    config = {"pool_sample": select.pool_sample, "cold": cold, **kinds, **settings, **task_key(turn.config)}
    return turn.stage("score", "scores", inputs, config, work, version=3)


def select(turn: Turn, scores: Artifact, evaluation: str, n: int, cold: bool) -> Artifact:
    """The batch to label, each record with the reason for which it was chosen."""
    chosen_by = turn.config.select.of_round(turn.number)
    auto = turn.config.select.strategy == AUTO

    def work(out: Path, scratch: Path) -> dict[str, Any]:
        folder = turn.path(scores.id)
        main = next(iter(read_evaluation(turn.path(evaluation)).values()))
        covers = cold or (auto and _is_uninformative(main.predictions))
        weakness = Weakness() if covers else _weakness(folder, worst_classes(main.per_class))
        table, labelled = parquet.read_table(folder / SCORES), _array(folder / LABELLED)
        batch = choose(chosen_by, table, n, turn.seed("select"), weakness=weakness, labelled=labelled, cold=covers)
        parquet.write_table(batch, out / BATCH)
        parquet.write_table(pool_map(table, batch, labelled, turn.seed("select")), out / MAP)
        reasons = compute.value_counts(batch["reason"]).to_pylist()
        return {
            "records": batch.num_rows,
            "reasons": {entry["values"]: entry["counts"] for entry in reasons},
            "worst_classes": list(weakness.classes),
            "strategy": chosen_by.cold_start if covers else chosen_by.strategy,
        }

    settings = {"select": chosen_by.model_dump(mode="json", exclude={"stop"}), "n": n, "auto": auto}
    inputs = {"scores": scores.id, "evaluation": evaluation}
    return turn.stage("select", "selection", inputs, settings, work, version=2)


def _is_uninformative(predictions: pa.Table) -> bool:
    """Whether the champion is known to be as sure of its wrong answers as of its right ones."""
    confidence = predictions["confidence"].to_numpy(zero_copy_only=False).astype(np.float64)
    found = informative(confidence, predictions["score"].to_numpy() >= 1.0)
    if found is False:
        log.info("  the champion's doubts do not tell where it errs yet: choosing for coverage")
    return found is False


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
