"""Gates and cascades of free text in a workspace: evaluated by their file, scored by a suite, and as a teacher."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as parquet
import pytest
from text_models import ROWS

from posttrain.inspect.evaluation import evaluate_model
from posttrain.loop.config import load_config
from posttrain.loop.stages.suggest import SUGGESTIONS
from posttrain.models.tiny import write_tiny_model
from posttrain.store.errors import UserError
from posttrain.store.workspace import Workspace

GATE = {"method": "gate", "models": ["models/bank", "models/home"], "data": "held.csv"}

CASCADE = {"method": "cascade", "models": ["models/bank", "models/home"], "data": "held.csv", "tolerance": 0.5}


@pytest.fixture
def root(text_workspace: Path) -> Path:
    return text_workspace


def write(root: Path, **values: Any) -> Path:
    file = root / "ensemble.yaml"
    file.write_text(json.dumps(values))
    return file


def evaluated(root: Path, **values: Any) -> dict[str, Any]:
    config = load_config(root)
    with Workspace.create(root, config.store) as store:
        return evaluate_model(store, config, str(write(root, **values)))


def runs(root: Path, stage: str) -> int:
    with Workspace.open(root, load_config(root).store, write=False) as store:
        return len(store.metadata.runs(stage=stage, status="done"))


def test_a_gate_beats_both_of_its_models(root: Path) -> None:
    result = evaluated(root, **GATE)
    assert result["metrics"]["accuracy"] == 1
    report = result["ensemble"]["test"]
    assert [row["accuracy"] for row in report["models"]] == [0.5, 0.5]
    assert report["chosen"]["shares"] == [0.5, 0.5]
    assert report["chosen"]["accuracy"] == 1
    assert report["fitted"]["score_alone"] == [0.5, 0.5]
    assert "on the 16 records of the fit the gate's choice scores 1.000" in report["fitted"]["why"]
    assert result["ensemble"]["overlap"]["metric"] == "token_f1"
    # The same file finds the fitted gate and its evaluation.
    assert evaluated(root, **GATE) == result
    assert runs(root, "ensemble") == 1


def test_another_scorer_is_another_fit(root: Path, small: Any) -> None:
    first = evaluated(root, **CASCADE)
    assert evaluated(root, **CASCADE, suite="test")["ensemble"]["test"]["fitted"] == first["ensemble"]["test"]["fitted"]
    second = evaluated(root, **CASCADE, suite="overlap")
    assert second["model"] != first["model"]
    config = small.configure
    suites = {"test": {"scorer": "regex", "pattern": "bank"}, "overlap": {"scorer": "token_f1"}}
    config(root, task={"labels": None, "max_new_tokens": 6}, evaluate={"suites": suites})
    third = evaluated(root, **CASCADE)
    assert third["model"] != first["model"]
    # The first model always writes the pattern, the second never.
    assert third["ensemble"]["test"]["fitted"]["score_alone"] == [1, 0]
    assert third["ensemble"]["test"]["chosen"]["shares"] == [1, 0]


def test_a_gate_labels_free_text(root: Path, small: Any, open_loop: Callable[[Path], Any]) -> None:
    small.write(root / "pool.csv", ROWS[16:22], ["text"])
    small.write(root / "test.csv", ROWS[22:])
    write(root, **GATE)
    label = {"annotator": "ensemble", "ensemble": "ensemble.yaml", "per_round": 4}
    small.configure(root, label=label, task={"labels": None, "max_new_tokens": 6})
    loop = open_loop(root)
    loop.run(1, until="label")
    state = loop.metadata.rounds()[1].detail
    rows = parquet.read_table(loop.store.artifacts.path(state["outputs"]["suggest"]) / SUGGESTIONS).to_pylist()
    assert len(rows) == 4
    assert all(row["accepted"] and row["confidence"] is None for row in rows)
    labels = parquet.read_table(loop.store.artifacts.path(state["labelled"]) / "labels.parquet").to_pylist()
    answers = {row["prompt"][-1]["content"]: row["completion"] for row in labels}
    assert answers == {row["text"]: row["label"] for row in ROWS[16:22] if row["text"] in answers}


def test_an_answer_that_was_cut_off_goes_to_people(root: Path, small: Any, open_loop: Callable[[Path], Any]) -> None:
    write_tiny_model(root / "untaught")
    write(root, method="vote", models=["./untaught"])
    label = {"suggest": "ensemble", "ensemble": "ensemble.yaml", "per_round": 4}
    small.configure(root, label=label, task={"labels": None, "max_new_tokens": 2})
    loop = open_loop(root)
    loop.run(1, until="suggest")
    meta = loop.store.artifacts.get(loop.metadata.rounds()[1].detail["outputs"]["suggest"]).meta
    assert (meta["suggested"], meta["unanswered"]) == (0, 4)


def test_people_who_compare_answers_see_no_suggestion(small: Any) -> None:
    root = small(task={"labels": None, "kind": "preference"}, label={"annotator": "people", "suggest": "ensemble"})
    with pytest.raises(UserError, match=r"label\.suggest: people compare two answers of the champion without a sugg"):
        load_config(root)
