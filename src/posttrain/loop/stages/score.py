"""Score: how unsure the champion is of the pool, and what is known of the records around it."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as compute
import pyarrow.parquet as parquet

from posttrain.evaluate.suite import read_evaluation
from posttrain.loop.context import RoundContext, task_key
from posttrain.loop.history import finished_rounds
from posttrain.loop.score_files import CASES, HARD_CASES, LABELLED, LABELLED_SCORES, SCORES, UNSCORED, cases_to_rows
from posttrain.loop.scoring import (
    add_cost_column,
    calibrated,
    forget_others,
    scoring_for,
    scoring_inputs,
    scoring_settings,
)
from posttrain.loop.stages.evaluate import evaluate
from posttrain.select.hard_cases import Evaluations, HardCase, hard_cases
from posttrain.select.pool_sample import sample_pool, sample_sizes, with_sample_sizes
from posttrain.select.scores.context import ScoringContext
from posttrain.select.scores.passes import to_matrix
from posttrain.select.scores.registry import SCORES as SCORE_NAMES
from posttrain.select.scores.table import embed_records, score_labelled, score_pool, unscored_table
from posttrain.select.strategy import MAX_AGREEMENT_RECORDS, neighbour_agreement
from posttrain.store.artifacts import Artifact


def free_records(pool: pa.Table, train: pa.Table) -> pa.Table:
    """The pool's records whose inputs the training set does not hold yet."""
    taken = pa.array(train["input_id"].to_pylist(), pa.string())
    return pool.filter(compute.invert(compute.is_in(pool["input_id"], value_set=taken)))


def score(
    turn: RoundContext, champion: str, pool: Artifact, train: str, test: Artifact, evaluation: str, cold: bool
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
                places = to_matrix(answered, "embedding")
            told = _neighbours(turn, scoring, measured, places)
        embedded = select.embedded_in(turn.number, cold, told.get("neighbours_share", True))
        beside = sample_pool(free, embedded - asked, seed, after=asked)
        placed = unscored_table(scaled, beside, select) if answered is None or beside.num_rows else None
        scores = with_sample_sizes(placed, free) if answered is None else answered
        if placed is not None and not cold:
            parquet.write_table(add_cost_column(placed, free, select.cost), out / UNSCORED)
        scores = add_cost_column(scores, free, select.cost)
        parquet.write_table(scores, out / SCORES)
        if learned.num_rows:
            np.save(out / LABELLED, embed_records(scoring, learned), allow_pickle=False)
            if of_answers := [name for name in names if SCORE_NAMES[name].of == "labelled"]:
                parquet.write_table(score_labelled(scoring, learned, of_answers), out / LABELLED_SCORES)
        if not cold:
            cases, hard = hard_test_cases(turn, evaluation, others, measured)
            (out / CASES).write_text(json.dumps(cases_to_rows(cases), ensure_ascii=False, indent=1), encoding="utf-8")
            np.save(out / HARD_CASES, embed_records(scoring, hard), allow_pickle=False)
        return {**sample_sizes(scores), "unasked": 0 if cold else beside.num_rows, "cold": cold, **fitted, **told}

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


def _neighbours(turn: RoundContext, scoring: ScoringContext, test: pa.Table, pool: np.ndarray) -> dict[str, Any]:
    """Whether test records that lie near each other share labels, which says whether covering the pool is worth it."""
    # The same in all rounds, so that a sentence model embeds them once.
    drawn = sample_pool(test, MAX_AGREEMENT_RECORDS, turn.config.seed)
    found = neighbour_agreement(embed_records(scoring, drawn), drawn["completion"].to_pylist(), pool)
    return {"neighbours_share": found.shared, "neighbours_kappa": found.kappa if found.records else None}


def others_evaluated(turn: RoundContext, champion: str, test: Artifact) -> dict[str, str]:
    """Evaluations of the models that the kinds of hard cases compare the champion with, by role.

    ``previous`` is the champion that this one replaced, for regressions; ``other`` the model that it was last judged
    against, a refused candidate among them, for disagreement. They follow from rounds that are done, so that a killed
    round finds the same.
    """
    kinds = turn.config.select.hard_cases
    models: dict[str, str] = {}
    for entry in finished_rounds(turn.workspace):
        if champion == entry.candidate and entry.champion_before not in (None, champion):
            models["previous"] = models["other"] = str(entry.champion_before)
        elif champion == entry.champion_before and entry.candidate not in (None, champion):
            models["other"] = str(entry.candidate)
    wanted = {"previous": "regressions" in kinds, "other": "disagreement" in kinds}
    return {role: evaluate(turn, model, test).id for role, model in models.items() if wanted[role]}


def hard_test_cases(
    turn: RoundContext, evaluation: str, others: dict[str, str], records: pa.Table
) -> tuple[list[HardCase], pa.Table]:
    """The hard cases of the first suite, and their records, in one order.

    Args:
        turn: the round.
        evaluation: of the champion.
        others: from `others_evaluated`.
        records: RECORD table of the test set.
    """
    ours = next(iter(read_evaluation(turn.path(evaluation)).values()))
    theirs = {role: read_evaluation(turn.path(id))[ours.name].predictions for role, id in others.items()}
    found = hard_cases(turn.config.select.hard_cases, Evaluations(ours.predictions, **theirs))
    row_of = {id: row for row, id in enumerate(records["id"].to_pylist())}
    cases = [case for case in found if case.id in row_of]
    return cases, records.take(pa.array([row_of[case.id] for case in cases], pa.int64()))
