"""The tokens that `supervised_unit` marks are those that the objective takes a loss on."""

from typing import Any

import pytest

from posttrain.train.config import TrainConfig
from posttrain.train.data.encoding import encode
from posttrain.train.objectives.build import supervised_unit
from posttrain.train.objectives.registry import OBJECTIVES

TOKENS = sorted(name for name, one in OBJECTIVES.items() if one.output not in ("reward", "classes"))


@pytest.mark.parametrize(
    ("objective", "settings"),
    [*((name, {}) for name in TOKENS), ("orpo", {"orpo": {"likelihood": "completion"}})],
)
def test_units_are_those_of_the_lesson(prepare: Any, shaped: Any, objective: str, settings: dict[str, Any]) -> None:
    prepared = prepare(objective, settings, moved=False)
    shape = OBJECTIVES[objective].shape
    units, _ = encode(prepared.lm, shaped(shape), prepared.objective.config.max_length, shape)
    assert [supervised_unit(prepared.objective.config, unit) for unit in units] == list(prepared.objective.units)


@pytest.mark.parametrize("objective", ["reward", "classification"])
def test_texts_with_one_result_have_no_learned_token(prepare: Any, shaped: Any, objective: str) -> None:
    """The objective reads the same texts, and puts a token behind them where the result is read off."""
    prepared = prepare(objective, moved=False)
    shape = OBJECTIVES[objective].shape
    units, _ = encode(prepared.lm, shaped(shape), 1024, shape)
    for unit, read in zip(units, prepared.objective.units, strict=True):
        shown = supervised_unit(TrainConfig(objective=objective), unit)
        assert [sequence.ids for sequence in shown] == [sequence.ids[:-1] for sequence in read]
        assert not any(any(sequence.supervised) for sequence in shown)
