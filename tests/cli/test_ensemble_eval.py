"""``posttrain eval`` of an ensemble: what it prints, and its mistakes."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Call = Callable[..., Any]


def write(root: Path, **values: Any) -> Path:
    file = root / "ensemble.yaml"
    file.write_text(json.dumps(values))
    return file


def test_a_cascade_prints_models_choice_and_curve(posttrain: Call, small: Any, finished_copy: Path) -> None:
    small.write(finished_copy / "held.csv", small.rows()[80:])
    file = write(finished_copy, method="cascade", models=["base", "champion"], tolerance=0.5, data="held.csv")
    out = posttrain("eval", "-w", finished_copy, "--model", file).out
    for text in ("test: each model alone", "test: this cascade", "test: cost and accuracy", "last alone", "s saved"):
        assert text in out
    assert "of 88 held-out records" in out
    report = posttrain("eval", "-w", finished_copy, "--model", file, "--json").json["ensemble"]["test"]
    assert set(report["curve"][0]) == {
        *("threshold", "shares", "accuracy", "low", "high", "seconds", "flops", "seconds_saved", "flops_saved")
    }
    assert report["curve"][0]["threshold"] is None


def test_a_model_without_an_ensemble_prints_as_before(posttrain: Call, finished_copy: Path) -> None:
    outcome = posttrain("eval", "-w", finished_copy, "--json")
    assert set(outcome.json) == {"model", "evaluation", "metrics"}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"method": "mean", "models": ["base"]}, "ensemble.yaml: `method`"),
        ({"method": "vote", "models": ["base", "champion"], "weights": [1]}, "1 weights for 2 models"),
        ({"method": "vote", "models": ["nobody"]}, "nothing here is called `nobody`"),
    ],
)
def test_a_mistake_ends_in_one_line_before_any_work(
    posttrain: Call, tree: Callable[[Path], dict[str, str]], finished_copy: Path, values: dict[str, Any], message: str
) -> None:
    file = write(finished_copy, **values)
    before = tree(finished_copy)
    assert message in posttrain("eval", "-w", finished_copy, "--model", file).mistake
    assert tree(finished_copy) == before


def test_a_file_that_is_missing_is_named(posttrain: Call, finished_copy: Path) -> None:
    assert "none.yaml: no such file" in posttrain("eval", "-w", finished_copy, "--model", "none.yaml").mistake


GATE = {"method": "gate", "models": ["models/bank", "models/home"], "data": "held.csv"}

CASCADE = {**GATE, "method": "cascade", "tolerance": 0.5}


def test_a_cascade_and_a_gate_print_their_tables(posttrain: Call, text_workspace: Path) -> None:
    out = posttrain("eval", "-w", text_workspace, "--model", write(text_workspace, **CASCADE)).out
    for text in (
        "test: each model alone",
        "test: this cascade",
        "test: cost and accuracy",
        "overlap: cost and token_f1",
    ):
        assert text in out
    out = posttrain("eval", "-w", text_workspace, "--model", write(text_workspace, **GATE)).out
    for text in ("test: this gate", "50.0% / 50.0%", "the gate's choice scores 1.000, the best single model 0.500"):
        assert text in out


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {**GATE, "suite": "other"},
            "ensemble.yaml: suite: there is no suite `other` in evaluate.suites; one of test,",
        ),
        ({**GATE, "data": "none.csv"}, "data: no such file: none.csv"),
        ({**GATE, "data": "test.csv"}, "12 of its 12 inputs are in suite `test`"),
        ({**GATE, "data": "half.csv"}, "half.csv:2: has no answer"),
    ],
)
def test_a_mistake_is_one_line_before_any_work(
    posttrain: Call, text_workspace: Path, values: dict[str, Any], message: str
) -> None:
    (text_workspace / "half.csv").write_text("text,label\nmy card is split,\n")
    assert message in posttrain("eval", "-w", text_workspace, "--model", write(text_workspace, **values)).mistake
    assert not list((text_workspace / ".posttrain" / "artifacts").glob("ensemble-*"))


def test_a_suite_of_likelihoods_scores_no_answers(posttrain: Call, text_workspace: Path, small: Any) -> None:
    suites = {"test": {"scorer": "perplexity"}}
    gate = {"deploy": ["perplexity >= 0"]}
    small.configure(text_workspace, task={"labels": None}, evaluate={"suites": suites}, gate=gate)
    mistake = posttrain("eval", "-w", text_workspace, "--model", write(text_workspace, **GATE)).mistake
    assert "ensemble.yaml: suite: scorer `perplexity` of suite `test` scores no written answers" in mistake
