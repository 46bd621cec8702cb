"""Score: how unsure the champion is of the pool, and what is known of the records around it."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as compute
import pyarrow.parquet as parquet

from posttrain.loop.stages.choose import CASES, HARD_CASES, LABELLED, LABELLED_SCORES, SCORES, UNASKED
from posttrain.loop.stages.costs import with_costs
from posttrain.loop.stages.hard_cases import as_rows, hard_test_cases, others_evaluated
from posttrain.loop.stages.scoring import calibrated, forget_others, scoring_for, scoring_inputs, scoring_settings
from posttrain.loop.turn import Turn, task_key
from posttrain.select.neighbours import MOST, neighbour_agreement
from posttrain.select.sample import sample_note, sample_pool, with_note
from posttrain.select.score import embed_records, place_records, score_labelled, score_pool
from posttrain.select.scores.arrays import as_matrix
from posttrain.select.scores.columns import Scoring
from posttrain.select.scores.names import SCORES as SCORE_NAMES
from posttrain.store.artifacts import Artifact


def free_records(pool: pa.Table, train: pa.Table) -> pa.Table:
    """The pool's records whose inputs the training set does not hold yet."""
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
    by_neighbours = bool(turn.config.task.label_set) and select.goes_by_neighbours(turn.number, cold)

    def work(out: Path, scratch: Path) -> dict[str, Any]:
        learned, measured = turn.dataset(train).records, turn.dataset(test.id).records
        free = free_records(turn.dataset(pool.id).records, learned)
        if turn.in_round:  # a preview with another config lets go of nothing
            forget_others(turn, scoring)
        fitted = {} if cold else calibrated(turn, scoring, measured, evaluation)
        scaled = replace(scoring, temperature=fitted.get("temperature", 1.0))
        asked, seed = 0 if cold else select.pool_sample, turn.seed("score")
        answered = None if cold else score_pool(scaled, free, scaled.labels, select, seed)
        told: dict[str, Any] = {}
        if by_neighbours:
            if answered is None:
                places = embed_records(scoring, sample_pool(free, select.pool_sample, seed))
            else:
                places = as_matrix(answered, "embedding")
            told = _neighbours(turn, scoring, measured, places)
        embedded = select.embedded_in(turn.number, cold, told.get("neighbours_share", True))
        beside = sample_pool(free, embedded - asked, seed, after=asked)
        placed = place_records(scaled, beside, select) if answered is None or beside.num_rows else None
        scores = with_note(placed, free) if answered is None else answered
        if placed is not None and not cold:
            parquet.write_table(with_costs(placed, free, select.cost), out / UNASKED)
        scores = with_costs(scores, free, select.cost)
        parquet.write_table(scores, out / SCORES)
        if learned.num_rows:
            np.save(out / LABELLED, embed_records(scoring, learned), allow_pickle=False)
            if of_answers := [name for name in names if SCORE_NAMES[name].of == "labelled"]:
                parquet.write_table(score_labelled(scoring, learned, of_answers), out / LABELLED_SCORES)
        if not cold:
            cases, hard = hard_test_cases(turn, evaluation, others, measured)
            (out / CASES).write_text(json.dumps(as_rows(cases), ensure_ascii=False, indent=1), encoding="utf-8")
            np.save(out / HARD_CASES, embed_records(scoring, hard), allow_pickle=False)
        return {**sample_note(scores), "unasked": 0 if cold else beside.num_rows, "cold": cold, **fitted, **told}

    inputs = {"champion": champion, "pool": pool.id, "train": train, "evaluation": evaluation, **others}
    inputs |= {"sentence model": scoring.sentences.id} if scoring.sentences else {}
    inputs |= {"test": test.id} if by_neighbours or not cold else {}
    inputs |= {} if cold else scoring_inputs(scoring, names)
    kinds = {} if cold else {"hard_cases": select.hard_cases}
    settings = scoring_settings(turn, cold=cold)
    sizes: dict[str, Any] = {"pool_sample": select.pool_sample, "embedded": select.embedded_in(turn.number, cold)}
    sizes |= {"by_neighbours": by_neighbours}
    sizes |= {"cost": select.cost} if select.cost else {}
    config = {**sizes, "cold": cold, **kinds, **settings, **task_key(turn.config)}
    return turn.stage("score", "scores", inputs, config, work, version=6)


def _neighbours(turn: Turn, scoring: Scoring, test: pa.Table, pool: np.ndarray) -> dict[str, Any]:
    """Whether test records that lie near each other share labels, which says whether covering the pool is worth it."""
    # The same in all rounds, so that a sentence model embeds them once.
    drawn = sample_pool(test, MOST, turn.config.seed)
    found = neighbour_agreement(embed_records(scoring, drawn), drawn["completion"].to_pylist(), pool)
    return {"neighbours_share": found.shared, "neighbours_kappa": found.kappa if found.records else None}
