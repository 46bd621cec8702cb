"""Mistakes in an ensemble's file are one clear line each."""

from pathlib import Path
from typing import Any

import pytest

from posttrain.models.ensembles.config import EnsembleConfig, check_task, normalised_weights
from posttrain.store.errors import UserError

TWO = ["a", "b"]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"method": "mean", "models": TWO}, "`method`"),
        ({"method": "vote", "models": []}, "`models`"),
        ({"method": "vote"}, "`models`"),
        ({"method": "vote", "models": TWO, "weights": [1]}, "1 weights for 2 models"),
        ({"method": "vote", "models": TWO, "weights": [1, -1]}, "weights are 0 or more"),
        ({"method": "vote", "models": TWO, "weights": [0, 0]}, "one of them is above 0"),
        ({"method": "vote", "models": TWO, "weights": [1, float("nan")]}, "finite number"),
        ({"method": "vote", "models": TWO, "weights": "fit"}, "`weights`"),
        ({"method": "average", "models": TWO, "weights": [True, False]}, "`weights`: a number is expected"),
        ({"method": "gate", "models": TWO}, "`data` is needed"),
        ({"method": "gate", "models": TWO, "data": "x", "weights": [1, 1]}, "gate has no weights"),
        ({"method": "vote", "models": TWO, "data": "x"}, "`data` has no use"),
        ({"method": "vote", "models": TWO, "accuracy": 0.9}, "`accuracy` is of method cascade"),
        ({"method": "cascade", "models": TWO}, "needs one of"),
        ({"method": "cascade", "models": TWO, "accuracy": 0.9, "thresholds": [1]}, "needs one of"),
        ({"method": "cascade", "models": TWO, "thresholds": [1, 1]}, "2 thresholds for 2 models"),
        ({"method": "cascade", "models": TWO, "thresholds": [-1]}, "a threshold is 0 or more"),
        ({"method": "cascade", "models": TWO, "accuracy": 1.5, "data": "x"}, "less than 1"),
        ({"method": "vote", "models": TWO, "suite": "test"}, "`suite` has no use"),
        ({"method": "vote", "models": TWO, "weight": [1, 1]}, "unknown key `weight`; did you mean `weights`?"),
    ],
)
def test_a_mistake_is_named(values: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as caught:
        EnsembleConfig.read(values, "ensemble.yaml")
    assert message in str(caught.value)
    assert "ensemble.yaml" in str(caught.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"none\.yaml: no such file; check the path"):
        EnsembleConfig.load(tmp_path / "none.yaml")


def test_weights_add_up_to_one() -> None:
    config = EnsembleConfig.read({"method": "vote", "models": TWO, "weights": [1, 3]}, "x")
    assert normalised_weights(config) == [0.25, 0.75]
    assert normalised_weights(EnsembleConfig.read({"method": "vote", "models": TWO}, "x")) == [0.5, 0.5]


@pytest.mark.parametrize(
    ("values", "has_labels", "message"),
    [
        ({"method": "cascade", "data": "x", "accuracy": 0.9, "suite": "test"}, True, "x: suite: is of free text"),
        ({"method": "average"}, False, "x: method: averages probabilities of labels"),
    ],
)
def test_a_method_that_cannot_answer_the_task_is_refused(
    values: dict[str, Any], has_labels: bool, message: str
) -> None:
    config = EnsembleConfig.read({"models": TWO, **values}, "x")
    with pytest.raises(UserError, match=message):
        check_task(config, has_labels, "x")
    check_task(config, not has_labels)
