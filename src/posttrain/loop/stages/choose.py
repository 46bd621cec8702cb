"""Score and select: which pool records get a label."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as compute
import pyarrow.parquet as parquet

from posttrain.evaluate.artifact import read_evaluation
from posttrain.evaluate.hard_cases import hard_cases, worst_classes
from posttrain.loop.turn import Turn, task_key
from posttrain.select.batch import choose
from posttrain.select.score import embed_records, sample_note, score_pool
from posttrain.store.artifacts import Artifact

SCORES, HARD_CASES, LABELLED, BATCH = "scores.parquet", "hard_cases.npy", "labelled.npy", "batch.parquet"


def free_records(pool: pa.Table, train: pa.Table) -> pa.Table:
    """The pool's records that the training set does not hold yet, and that differ from each other."""
    taken = pa.array(train["input_id"].to_pylist(), pa.string())
    return pool.filter(compute.invert(compute.is_in(pool["input_id"], value_set=taken)))


def score(
    turn: Turn, champion: str, pool: Artifact, train: str, test: Artifact, evaluation: str, cold: bool
) -> Artifact:
    """How unsure the champion is of the pool, and where its hard test cases lie."""

    def work(out: Path, scratch: Path) -> dict[str, Any]:
        lm = turn.model(champion)
        learned = turn.dataset(train).records
        free = free_records(turn.dataset(pool.id).records, learned)
        labels = turn.config.task.label_set
        scores = score_pool(lm, free, labels, turn.config.select, turn.seed("score"), cold=cold)
        parquet.write_table(scores, out / SCORES)
        if learned.num_rows:
            np.save(out / LABELLED, embed_records(lm, learned), allow_pickle=False)
        if not cold:
            main = next(iter(read_evaluation(turn.path(evaluation)).values()))
            wanted = set(hard_cases(main.predictions))
            records = turn.dataset(test.id).records
            hard = records.filter(pa.array([id in wanted for id in records["id"].to_pylist()], pa.bool_()))
            np.save(out / HARD_CASES, embed_records(lm, hard), allow_pickle=False)
        return {**sample_note(scores), "cold": cold}

    inputs = {"champion": champion, "pool": pool.id, "train": train, "evaluation": evaluation}
    config = {"pool_sample": turn.config.select.pool_sample, "cold": cold, **task_key(turn.config)}
    return turn.stage("score", "scores", inputs, config, work, version=2)


def select(turn: Turn, scores: Artifact, evaluation: str, cold: bool) -> Artifact:
    """The batch to label, each record with the reason for which it was chosen."""

    def work(out: Path, scratch: Path) -> dict[str, Any]:
        folder = turn.path(scores.id)
        main = next(iter(read_evaluation(turn.path(evaluation)).values()))
        worst = [] if cold else worst_classes(main.per_class)
        batch = choose(
            turn.config.select,
            parquet.read_table(folder / SCORES),
            turn.config.label.per_round,
            turn.seed("select"),
            worst_classes=worst,
            hard_cases=_array(folder / HARD_CASES),
            labelled=_array(folder / LABELLED),
            cold=cold,
        )
        parquet.write_table(batch, out / BATCH)
        reasons = compute.value_counts(batch["reason"]).to_pylist()
        return {
            "records": batch.num_rows,
            "reasons": {entry["values"]: entry["counts"] for entry in reasons},
            "worst_classes": worst,
        }

    config = {"select": turn.config.select.model_dump(mode="json"), "n": turn.config.label.per_round}
    return turn.stage("select", "selection", {"scores": scores.id, "evaluation": evaluation}, config, work)


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
