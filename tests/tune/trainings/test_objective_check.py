"""Objectives that a round cannot measure are refused before any work."""

from typing import Any

import pytest

from posttrain.loop.config import load_config
from posttrain.store.errors import UserError


@pytest.mark.parametrize("objective", ["reward", "classification"])
def test_objectives_without_answers_are_refused(small: Any, objective: str) -> None:
    with pytest.raises(UserError, match=f"train.objective: `{objective}` makes a model that judges"):
        load_config(small(train={"objective": objective}))


@pytest.mark.parametrize("objective", ["sft", "dpo", "kto"])
def test_objectives_with_answers_are_accepted(small: Any, objective: str) -> None:
    assert load_config(small(train={"objective": objective})).train.objective.name == objective


PREFERENCES: dict[str, Any] = {
    "task": {"kind": "preference", "labels": None},
    "label": {"annotator": "people"},
    "gate": {"deploy": []},
}


def test_a_loop_on_preferences_trains_and_measures_pairs(small: Any) -> None:
    config = load_config(small(**PREFERENCES))
    assert config.train.objective.name == "dpo"
    assert [suite.scorer for suite in config.evaluate.suites.values()] == ["preference"]
    assert "gain.preference_accuracy" in str(config.gate)
    assert load_config(small(**PREFERENCES, train={"objective": "ipo"})).train.objective.name == "ipo"


def test_a_loop_on_preferences_tunes_by_pairs(small: Any) -> None:
    tune = {"space": "auto", "held_out": "20%", "budget": "10 trials"}
    config = load_config(small(**PREFERENCES, tune=tune)).tune
    assert config is not None
    assert config.metrics == ("preference_accuracy",)
    assert config.searched.directions == (True,)
    assert "train.objective.beta" in config.space


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"task": {"kind": "preference"}}, "task.labels: a loop on preferences has no label set"),
        ({"label": {"annotator": "oracle"}}, "label.annotator: `oracle` cannot choose between two answers"),
        ({"train": {"objective": "sft"}}, "train.objective: `sft` does not train on pairs of answers"),
    ],
)
def test_parts_that_preferences_cannot_use_are_refused(small: Any, sections: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        load_config(small(**{**PREFERENCES, **sections}))
