"""The kinds of hard cases that the config names, in a round."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from posttrain.evaluate.suite import read_evaluation
from posttrain.loop.config import load_config
from posttrain.loop.context import RoundContext
from posttrain.loop.loop import Loop
from posttrain.loop.score_files import CASES, HARD_CASES, cases_from_rows
from posttrain.loop.stages.score import evaluations_to_compare, hard_test_cases
from posttrain.select.hard_cases import HARD_CASE_KINDS
from posttrain.store.workspace import Workspace


def predictions_by_id(store: Workspace, evaluation: str) -> dict[str, dict[str, Any]]:
    result = read_evaluation(store.artifacts.path(evaluation))["test"].predictions
    return {row["id"]: row for row in result.to_pylist()}


@pytest.mark.slow
def test_a_round_compares_the_champion_with_the_previous_champion(small: Any, finished_copy: Path) -> None:
    small.configure(finished_copy, select={"hard_cases": list(HARD_CASE_KINDS)})
    with Workspace.create(finished_copy) as store:
        Loop(store, load_config(finished_copy)).run(3, until="score")
        detail = store.metadata.round(3).detail  # type: ignore[union-attr]
        [score_run] = [entry for entry in store.metadata.runs(stage="score") if entry.output == detail["scores"]]
        assert {"previous", "other"} <= set(score_run.inputs)
        folder = store.artifacts.path(detail["scores"])
        cases = cases_from_rows(json.loads((folder / CASES).read_text(encoding="utf-8")))
        now = predictions_by_id(store, score_run.inputs["evaluation"])
        before = predictions_by_id(store, score_run.inputs["previous"])
        by_kind = {kind: {case.id for case in cases if kind in case.kinds} for kind in HARD_CASE_KINDS}
        assert by_kind["wrong"] == {id for id, row in now.items() if row["score"] < 1}
        assert by_kind["regressions"] == {id for id in by_kind["wrong"] if before[id]["score"] == 1}
        assert by_kind["disagreement"] == {id for id in now if now[id]["predicted"] != before[id]["predicted"]}
        threshold = np.percentile([-row["log_likelihood"] for row in now.values()], 90)
        assert by_kind["high_loss"] == {id for id, row in now.items() if -row["log_likelihood"] > threshold}
        assert len(np.load(folder / HARD_CASES)) == len(cases)


def test_by_default_no_other_model_is_evaluated(finished_loop: Any) -> None:
    store = finished_loop.store
    detail = store.metadata.round(2).detail
    [score_run] = [entry for entry in store.metadata.runs(stage="score") if entry.output == detail["scores"]]
    assert not {"previous", "other"} & set(score_run.inputs)
    cases = json.loads((store.artifacts.path(detail["scores"]) / CASES).read_text(encoding="utf-8"))
    now = predictions_by_id(store, score_run.inputs["evaluation"])
    assert {case["id"] for case in cases} == {id for id, row in now.items() if row["score"] < 1}


def test_a_refused_candidate_is_the_other_model(evaluated_loop: Callable[..., Any]) -> None:
    loop = evaluated_loop(
        select={"hard_cases": ["disagreement", "regressions"]}, gate={"deploy": ["accuracy >= 2"]}, rounds=3
    )
    store, config = loop.store, load_config(loop.root)
    loop.run()
    last_round = store.metadata.round(3)
    assert last_round is not None
    test = store.artifacts.get(last_round.detail["test"])
    context = RoundContext(store, config, 4, in_round=False)
    others = evaluations_to_compare(context, str(last_round.champion_before), test.id)
    assert others["other"] == last_round.detail["evaluation"]
    others = {"other": others["other"]}
    records = context.dataset(test.id).records
    cases, rows = hard_test_cases(context, last_round.detail["champion_evaluation"], others, records)
    assert rows["id"].to_pylist() == [case.id for case in cases]
    base = predictions_by_id(store, last_round.detail["champion_evaluation"])
    refused = predictions_by_id(store, last_round.detail["evaluation"])
    assert {case.id for case in cases} == {id for id in base if base[id]["predicted"] != refused[id]["predicted"]}
