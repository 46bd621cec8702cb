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
